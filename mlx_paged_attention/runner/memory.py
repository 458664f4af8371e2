"""How much memory there is for MLX's arrays, on this machine and for this process."""

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import psutil

# Where Linux says what a container may take and has taken: control groups of version 2, then of version 1.
_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class DeviceMemory:
    """What MLX's default device has left.

    Attributes:
        free: bytes.
        limited_by: what it was read off, for a person.
    """

    free: int
    limited_by: str


def device_memory() -> DeviceMemory:
    """The least of what the device recommends, what the container allows and what the machine has free."""
    ours = mx.get_cache_memory()  # MLX keeps it to use it again
    found = [(psutil.virtual_memory().available + ours, "free memory of the machine")]
    group = _free_in_group()
    if group is not None:
        found.append((group + ours, "free memory of the container"))
    if mx.default_device().type == mx.DeviceType.gpu:
        info = mx.device_info()
        active = mx.get_active_memory()
        if working_set := info.get("max_recommended_working_set_size"):
            found.append((int(working_set) - active, "the recommended working set of the GPU"))
        elif total := info.get("total_memory"):  # memory of its own: what the machine has does not matter
            found = [(int(total) - active, "free memory of the GPU")]
    free, limited_by = min(found)
    return DeviceMemory(free, limited_by)


def _free_in_group() -> int | None:
    """Bytes that this process's control group may still take; ``None`` without a limit."""
    for directory, limit, used in _GROUPS:
        try:
            most = int((directory / limit).read_text())  # "max" where there is none
            taken = int((directory / used).read_text())
            lines = (directory / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):
            continue
        # Files that were read, such as weights, are kept only as long as nobody needs the memory.
        counts = {name: int(value) for name, value in (line.split() for line in lines)}
        return most - taken + counts.get("inactive_file", 0) + counts.get("active_file", 0)
    return None
