"""The header of a GGUF file: its metadata and where its tensors lie. Reads no tensor data.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_paged_attention.errors import ModelLoadError

GGML_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4",
}  # fmt: skip
# Elements and bytes per block of the types that can be loaded.
BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144),
    "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
LOADABLE_TYPES = tuple(BLOCKS)

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MIN_KEY_BYTES = 8 + 4 + 1  # length of an empty name, value type, one byte of value
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # length of an empty name, number of dimensions, type, offset


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a GGUF file.

    Attributes:
        name: GGUF's name, such as ``blk.0.attn_q.weight``.
        type: GGML's type name, such as ``Q4_1``.
        shape: rows first, as numpy and MLX order it (GGUF stores the reverse).
        offset: position of its data in the file, in bytes.
        nbytes: size of its data, or ``None`` for a type that cannot be loaded.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What a GGUF file says about itself.

    Attributes:
        version: 2 or 3.
        metadata: key to int, float, bool, str or a list of one of these.
        tensors: in file order.
        file_size: of the whole file, in bytes.
    """

    version: int
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    file_size: int


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read metadata and tensor table of the GGUF file at ``path``.

    Raises:
        ModelLoadError: the file is missing, is no GGUF file, or its header is damaged.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelLoadError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data).header()
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from error
    except _DamagedError as error:
        raise ModelLoadError(f"{path} is damaged or cut short: {error}") from error


class _DamagedError(Exception):
    """The header contradicts itself or the file's size."""


class _Reader:
    """A cursor over the bytes of a GGUF file. Every count is held against the bytes that are left
    before anything is allocated for it."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.position = 4  # behind the magic

    def header(self) -> GGUFHeader:
        version = self.scalar("I")
        if version not in (2, 3):
            raise _DamagedError(f"GGUF version {version} (little-endian 2 and 3 can be read)")
        n_tensors, n_keys = self.scalar("Q"), self.scalar("Q")
        self.require(n_keys * _MIN_KEY_BYTES + n_tensors * _MIN_TENSOR_BYTES, "keys and tensors")
        metadata = {}
        for _ in range(n_keys):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"))
        infos = [self.tensor_info() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise _DamagedError(f"alignment of {alignment!r}")
        start = -(-self.position // alignment) * alignment
        tensors = tuple(
            TensorInfo(name, type_name, shape, start + offset, _nbytes(name, type_name, shape))
            for name, type_name, shape, offset in infos
        )
        return GGUFHeader(version, metadata, tensors, self.size)

    def require(self, nbytes: int, what: str) -> None:
        if nbytes > self.size - self.position:
            raise _DamagedError(f"{what} at byte {self.position} reach beyond the end of the file")

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        nbytes = struct.calcsize("<" + code) * count
        self.require(nbytes, f"{count} values")
        values = struct.unpack_from(f"<{count}{code}", self.data, self.position)
        self.position += nbytes
        return values

    def string(self) -> str:
        length = self.scalar("Q")
        self.require(length, "a string")
        raw = self.data[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise _DamagedError(f"a string before byte {self.position} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise _DamagedError(f"unknown value type {kind} before byte {self.position}")
        item_kind, count = self.scalar("I"), self.scalar("Q")
        if item_kind in _SCALARS:
            return list(self.scalars(_SCALARS[item_kind], count))
        if item_kind != _STRING:
            raise _DamagedError(f"array of value type {item_kind} before byte {self.position}")
        self.require(count * 8, f"{count} strings")
        return [self.string() for _ in range(count)]

    def tensor_info(self) -> tuple[str, str, tuple[int, ...], int]:
        name = self.string()
        n_dims = self.scalar("I")
        if not 1 <= n_dims <= _MAX_DIMS:
            raise _DamagedError(f"tensor {name!r} has {n_dims} dimensions")
        shape = tuple(reversed(self.scalars("Q", n_dims)))
        type_id, offset = self.scalar("I"), self.scalar("Q")
        return name, GGML_TYPE_NAMES.get(type_id, f"type {type_id}"), shape, offset


def _nbytes(name: str, type_name: str, shape: tuple[int, ...]) -> int | None:
    if type_name not in BLOCKS:
        return None
    elements, nbytes = BLOCKS[type_name]
    if shape[-1] % elements:
        raise _DamagedError(f"tensor {name!r} has rows of {shape[-1]}, not a multiple of {elements}")
    return math.prod(shape) // elements * nbytes
