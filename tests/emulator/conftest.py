import pytest

from .requirement import require_emulator


@pytest.fixture(autouse=True)
def _emulator() -> None:
    require_emulator()
