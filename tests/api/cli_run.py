"""The command line in this process, on a FakeLLM."""

from collections.abc import Callable
from typing import Any

import pytest
from fake_llm import FakeLLM

from mlx_paged_attention.api import cli
from mlx_paged_attention.config import EngineConfig


class Started(FakeLLM):
    """A FakeLLM that remembers how it was started; the last one is ``Started.last``."""

    last: "Started | None" = None

    def __init__(self, *, progress: Callable[[str], None], **options: Any) -> None:
        super().__init__()
        self.options = EngineConfig(**options)
        progress("loading")
        Started.last = self


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    status = cli.run(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def started() -> Started:
    """The engine of the last run."""
    assert Started.last is not None
    return Started.last
