"""Skips these tests, with the reason, where the emulator cannot run; in continuous integration that is a failure."""

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
