"""How much memory there is."""

from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_paged_attention.runner import memory
from mlx_paged_attention.runner.memory import DeviceMemory, device_memory

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine with 8 GiB free, no container, and nothing in MLX's cache."""
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    monkeypatch.setattr(memory, "_GROUPS", ((tmp_path, "memory.max", "memory.current"),))
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 0)
    return tmp_path


def on_gpu(monkeypatch, **info):
    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.DeviceType.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: GIB)


def test_a_cpu_has_what_the_machine_has_free_and_what_mlx_keeps(monkeypatch):
    assert device_memory() == DeviceMemory(8 * GIB, "free memory of the machine")
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 5)
    assert device_memory().free == 8 * GIB + 5


def test_a_container_has_what_it_may_take_and_files_that_were_read_count_for_nothing(machine):
    (machine / "memory.max").write_text(f"{4 * GIB}\n")
    (machine / "memory.current").write_text(f"{3 * GIB}\n")
    (machine / "memory.stat").write_text(f"anon 5\nactive_file {GIB}\ninactive_file {GIB // 2}\n")
    assert device_memory() == DeviceMemory(5 * GIB // 2, "free memory of the container")
    (machine / "memory.max").write_text("max\n")
    assert device_memory() == DeviceMemory(8 * GIB, "free memory of the machine")


def test_a_mac_has_its_working_set_or_what_is_free(monkeypatch):
    on_gpu(monkeypatch, max_recommended_working_set_size=6 * GIB, memory_size=32 * GIB)
    assert device_memory() == DeviceMemory(5 * GIB, "the recommended working set of the GPU")
    on_gpu(monkeypatch, max_recommended_working_set_size=24 * GIB, memory_size=32 * GIB)
    assert device_memory() == DeviceMemory(8 * GIB, "free memory of the machine")


def test_a_gpu_with_memory_of_its_own_has_that(monkeypatch):
    on_gpu(monkeypatch, total_memory=80 * GIB)
    assert device_memory() == DeviceMemory(79 * GIB, "free memory of the GPU")
