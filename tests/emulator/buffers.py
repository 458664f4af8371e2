"""Memory that a kernel gets: numpy arrays, or pages that exist only once they are touched."""

import ctypes
import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

# bfloat16 has no numpy type; its bits travel as uint16.
Array = np.ndarray[Any, Any]


class BufferDescription(ctypes.Structure):
    """As in runtime/launch.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("file", ctypes.c_int),
        ("bytes", ctypes.c_ulong),
        ("element_bytes", ctypes.c_uint),
        ("writable", ctypes.c_int),
        ("initialised", ctypes.c_int),
        ("name", ctypes.c_char_p),
    ]


class SparseArray:
    """Zeros that take no memory until written: a pool larger than the machine has memory.

    ``array`` sees what kernels write, and they see what is written into it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, bits: Any) -> None:
        self.shape = shape
        self.dtype = dtype
        self.ndim = len(shape)
        self.size = int(np.prod(shape, dtype=np.int64))
        count = self.size * np.dtype(bits).itemsize
        self.file = os.memfd_create("sparse array")
        os.ftruncate(self.file, count)
        self.array: Array = np.frombuffer(mmap.mmap(self.file, count), dtype=bits).reshape(shape)

    def __del__(self) -> None:
        os.close(self.file)


@dataclass(frozen=True)
class Buffer:
    """One argument of a kernel. Whatever is written to a writable one is in ``array`` after the launch."""

    array: Array
    name: str
    writable: bool = False
    initialised: bool = True
    file: int = -1

    def description(self) -> BufferDescription:
        assert self.array.flags.c_contiguous, self.name
        return BufferDescription(
            self.array.ctypes.data,
            self.file,
            self.array.nbytes,
            max(self.array.itemsize, 1),
            self.writable,
            self.initialised,
            self.name.encode(),
        )


def output(array: Array, name: str) -> Buffer:
    """A buffer that a kernel must write before it reads: all bits set, which is NaN."""
    array.reshape(-1).view(np.uint8)[...] = 0xFF
    return Buffer(array, name, writable=True, initialised=False)
