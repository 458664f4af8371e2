"""Kernels without a GPU: run by the Metal emulator."""

import pytest
from emulated_kernels import emulated_kernels

from mlx_paged_attention.ops.kernels import make


@pytest.fixture
def emulator():
    """Kernels run in the emulator."""
    with emulated_kernels():
        yield


@pytest.fixture
def plant(monkeypatch):
    """Change the text of a kernel: ``plant(file, right, wrong)``."""
    real = make.source

    def change(file, right, wrong):
        assert real(file).count(right) == 1
        monkeypatch.setattr(
            make, "source", lambda name: real(name).replace(right, wrong) if name == file else real(name)
        )
        make._compiled.cache_clear()

    return change
