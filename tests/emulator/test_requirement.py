"""Where there is no compiler, tests say what to install; in continuous integration they fail."""

import pytest

from . import toolchain
from .errors import EmulatorError
from .requirement import require_emulator


@pytest.fixture
def no_clang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_compilers", list)


@pytest.mark.usefixtures("no_clang")
@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_missing_compiler_skips_tests_but_fails_them_in_ci(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match=r"apt-get install .*clang-19"):
        require_emulator()


@pytest.mark.usefixtures("no_clang")
def test_a_kernel_without_a_compiler_says_what_to_install() -> None:
    toolchain.compiler.cache_clear()
    with pytest.raises(EmulatorError, match="clang-19"):
        toolchain.compiler()


def test_on_other_machines_the_emulator_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(toolchain.sys, "platform", "darwin")
    with pytest.raises(pytest.skip.Exception, match="Linux on x86-64"):
        require_emulator()
