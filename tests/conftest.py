"""Fixtures shared by all tests: tiny models on disk, their references, engines kept between tests."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Threads that wait for each other gain tiny models nothing, and cost tenfold on a busy machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

# Before anything imports mlx.core: on Linux's CPU build this loads a fast BLAS.
import mlx_paged_attention

if TYPE_CHECKING:
    from oracle import Oracle


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny model, written when first asked for."""
    root = tmp_path_factory.mktemp("tiny-models")

    def directory(name: str) -> Path:
        from tiny_models import write_tiny_model

        path = root / name
        return path if path.exists() else write_tiny_model(name, path)

    return directory


@pytest.fixture(scope="session")
def oracle(tiny_model: Callable[[str], Path]) -> Callable[[str], "Oracle"]:
    """mlx-lm's answers for a tiny model."""
    loaded: dict[str, Oracle] = {}

    def of(name: str) -> "Oracle":
        from oracle import Oracle

        if name not in loaded:
            loaded[name] = Oracle.load(tiny_model(name))
        return loaded[name]

    return of


@pytest.fixture(scope="session")
def engine(tiny_model: Callable[[str], Path]) -> Iterator[Callable[..., "mlx_paged_attention.LLM"]]:
    """An ``LLM`` of a tiny model, shared by all tests that ask for the same options.

    Its prefix cache is shared too: tests that count hits set a ``cache_salt`` of their own.
    """
    running: dict[tuple[Any, ...], mlx_paged_attention.LLM] = {}

    def start(name: str, **options: Any) -> "mlx_paged_attention.LLM":
        options = {"block_size": 16, "num_blocks": 256, "max_num_seqs": 16, **options}
        key = (name, *sorted(options.items()))
        if key not in running:
            running[key] = mlx_paged_attention.LLM(
                model=str(tiny_model(name)), skip_tokenizer_init=True, **options
            )
        return running[key]

    yield start
    for llm in running.values():
        llm.close()
