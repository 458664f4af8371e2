"""What a test that needs the emulator does where it cannot run."""

import os

import pytest

from .toolchain import runs_on_this_machine, what_is_missing


def require_emulator() -> None:
    """Skips the test and says what to install. In continuous integration a missing compiler is a failure."""
    reason = what_is_missing()
    if reason is None:
        return
    if runs_on_this_machine() and os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
