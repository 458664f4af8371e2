"""Kernels without a GPU: run by the Metal emulator."""

import os

import pytest
from emulator import metal_kernel, what_is_missing

from mlx_paged_attention.ops.kernels import make


@pytest.fixture
def emulator(monkeypatch):
    """Kernels run in the emulator."""
    if reason := what_is_missing():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)

    def emulated(name, inputs, outputs, body, mutable):
        header = make.source("metal.h")
        options = {"ensure_row_contiguous": False, "mutable_inputs": mutable}
        return metal_kernel(name, inputs, outputs, body, header, **options)

    monkeypatch.setattr(make, "compile_kernel", emulated)
    make._compiled.cache_clear()
    yield
    make._compiled.cache_clear()


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
