"""Memory that both MLX and numpy can name, committed by the operating system as it is first written."""

import ctypes
import io
import mmap
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

# Loading runs Python on a thread of MLX, which must get the interpreter's lock; ``mx.clear_cache`` keeps
# that lock while it waits for MLX's threads. mlx-lm calls it in the middle of a generation, in whatever
# thread it is used.
_RESERVING = threading.Lock()
_clear_cache: Callable[[], None] = mx.clear_cache

_libc = ctypes.CDLL(None)
# Elsewhere than on Linux pages that are not needed are not lost: those that are free are.
_ADVICE = mmap.MADV_DONTNEED if sys.platform == "linux" else mmap.MADV_FREE


def _clear_cache_in_turn() -> None:
    """``mx.clear_cache``, but not while memory is being reserved."""
    with _RESERVING:  # waiting for it gives up the interpreter's lock
        _clear_cache()


mx.clear_cache = _clear_cache_in_turn


def reserve(shape: tuple[int, ...]) -> tuple[mx.array, NDArray[np.float32]]:
    """A float32 array of unspecified content, as MLX's and as numpy's writable view of the same memory.

    ``mx.empty`` and ``mx.zeros`` write every page on the CPU, and MLX takes numpy's memory by copying it.
    Loading is the one way to have MLX allocate and not write: it hands the memory to the file
    to be filled, and this file leaves it as it is.
    """
    with _RESERVING:
        array = mx.load(cast(BinaryIO, _Unread(shape)), format="npy")
        assert isinstance(array, mx.array)
        mx.eval(array)
        mx.synchronize()  # the file is given up on that thread, too
    return array, np.array(array, copy=False)


def release(view: NDArray[np.float32]) -> None:
    """Give the pages of contiguous memory back to the system: what is in it is lost; it may be written again.

    To free it need not do so: glibc, for one, keeps what is below 32 MiB. The ends stay, which share their
    pages with others, and so does all of it where pages are locked.
    """
    assert view.flags.c_contiguous
    begin, end = view.ctypes.data, view.ctypes.data + view.nbytes
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _ADVICE)


class _Unread(io.RawIOBase):
    """A ``.npy`` file of float32 whose data is never there: reading it leaves the buffer as it is."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            self._header, {"descr": "<f4", "fortran_order": False, "shape": shape}
        )
        self._data_begins = self._header.tell()
        self._header.seek(0)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._header.tell() < self._data_begins:
            return self._header.readinto(buffer)
        return len(buffer)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._header.seek(offset, whence)

    def tell(self) -> int:
        return self._header.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
