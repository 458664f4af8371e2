import stat
import sys
from pathlib import Path

import pytest

from mlx_paged_attention.paths import cache_dir


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    for name in ("MLX_PAGED_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


def test_the_package_variable_wins(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_PAGED_CACHE", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "mine"


def test_linux_uses_the_xdg_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "mlx-paged-attention"


@pytest.mark.parametrize("xdg", [None, "", "relative/path"])
def test_linux_falls_back_to_the_home_directory(monkeypatch, home, xdg):
    monkeypatch.setattr(sys, "platform", "linux")
    if xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert cache_dir() == home / ".cache" / "mlx-paged-attention"


def test_macos_uses_library_caches(monkeypatch, home):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_dir() == home / "Library" / "Caches" / "mlx-paged-attention"


def test_the_directory_exists_and_is_private(home):
    assert stat.S_IMODE(cache_dir().stat().st_mode) == 0o700
