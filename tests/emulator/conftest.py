"""Skips these tests, with the reason, where the emulator cannot run; in CI, fails them."""

import os

import pytest

from .toolchain import what_is_missing


@pytest.fixture(autouse=True)
def _emulator_can_run() -> None:
    reason = what_is_missing()
    if reason is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
