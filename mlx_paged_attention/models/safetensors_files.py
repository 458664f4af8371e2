"""The safetensors files of a model directory, checked by their headers before MLX reads them.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON header, data).
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from mlx_paged_attention.errors import ModelLoadError

INDEX = "model.safetensors.index.json"

_MAX_HEADER = 100_000_000  # bytes, the format's own limit
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64,
    "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
}  # fmt: skip
_SHARD = re.compile(r"(model.*-)(\d+)-of-(\d+)\.safetensors")
_AGAIN = "download it again"


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory that mlx-lm loads.

    Raises:
        ModelLoadError: there are none.
    """
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise ModelLoadError(
            f"{path} holds no model*.safetensors; convert other formats with 'mlx_lm.convert'"
        )
    return files


def check_weight_files(path: Path, index: dict[str, Any] | None) -> None:
    """Raise ``ModelLoadError`` unless all shards of the directory are there and whole, each tensor once.

    Args:
        index: content of the directory's ``INDEX``, if it has one.
    """
    weight_map = None if index is None else index.get("weight_map")
    if index is not None and not isinstance(weight_map, dict):
        raise ModelLoadError(f"{path / INDEX} has no weight_map")
    named = {str(shard) for shard in (weight_map or {}).values()}
    if missing := sorted(shard for shard in named if not (path / shard).is_file()):
        raise ModelLoadError(f"{path} lacks {_some(missing)}, which its index names: {_AGAIN}")
    files = weight_files(path)
    if missing := _missing_numbers([file.name for file in files]):
        raise ModelLoadError(f"{path} lacks {_some(missing)}, as the names of its other shards say: {_AGAIN}")
    found: dict[str, Path] = {}
    for file in files:
        for name in read_tensor_names(file):
            if (other := found.setdefault(name, file)) is not file:
                raise ModelLoadError(
                    f"{name} is in {other.name} and in {file.name} of {path}: which one counts is unknown; "
                    "remove the file that does not belong to this model"
                )
    if lost := sorted(name for name in weight_map or {} if name not in found):
        raise ModelLoadError(f"{path}: its index names {_some(lost)}, which no shard holds: {_AGAIN}")


def read_tensor_names(path: Path) -> list[str]:
    """The tensors that a file's header lists.

    Raises:
        ModelLoadError: the file is cut short, or its header contradicts itself or the file's size.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ModelLoadError(f"{path} is cut short or no safetensors file; {_AGAIN}")
        try:
            entries = json.loads(file.read(length))
            tensors = {name: entry for name, entry in entries.items() if name != "__metadata__"}
            ends = [_checked_end(path, name, entry) for name, entry in tensors.items()]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ModelLoadError(f"the header of {path} is damaged; {_AGAIN}") from error
    end = 8 + length + max(ends, default=0)
    if end != size:
        raise ModelLoadError(
            f"{path} has {size} bytes, its header promises {end}: it is cut short or damaged; {_AGAIN}"
        )
    return list(tensors)


def _checked_end(path: Path, name: str, entry: dict[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    bits = _BITS.get(entry["dtype"])  # MLX names the types it does not know
    if bits is not None and math.prod(entry["shape"]) * bits != (end - begin) * 8:
        raise ModelLoadError(
            f"{path}: {name} is {entry['dtype']} of shape {entry['shape']}, which does not fit its "
            f"{end - begin} bytes; {_AGAIN}"
        )
    return int(end)


def _missing_numbers(names: list[str]) -> list[str]:
    """Shards that ``model-00001-of-00003.safetensors`` and the like say there must be."""
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    wanted = [
        f"{shard[1]}{number:0{len(shard[2])}}-of-{shard[3]}.safetensors"
        for shard in shards
        for number in range(1, int(shard[3]) + 1)
    ]
    return sorted(set(wanted) - set(names))


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
