import sys

import pytest
from models.gguf_files import write_gguf

from mlx_paged_attention.models.load import load_model
from mlx_paged_attention.models.loading_bar import loading_bar
from mlx_paged_attention.models.source import resolve


def test_nothing_is_shown_where_stderr_is_no_terminal(capfd):
    with loading_bar(10, shown=True) as advance:
        advance(10)
    assert capfd.readouterr() == ("", "")


def test_nothing_is_shown_unless_asked(capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with loading_bar(10, shown=False) as advance:
        advance(10)
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def bars(monkeypatch):
    """The bars of one load: whether shown, their total and what they were told."""
    seen = []

    class Bar:
        def __init__(self, **options):
            seen.append((options["disable"], options["total"], told := []))
            self.update = told.append

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    return seen


@pytest.mark.parametrize("kind", ["directory", "gguf"])
@pytest.mark.parametrize("progress", [True, False])
def test_every_byte_is_counted_once(kind, progress, tiny_model, tmp_path, bars):
    path = tiny_model("llama")
    if kind == "gguf":
        write_gguf(path, tmp_path / "tiny.gguf", quantised="Q8_0")
        path = tmp_path / "tiny.gguf"
    load_model(resolve(str(path), progress=progress), dtype="auto", device="cpu")
    ((disable, total, told),) = bars
    assert disable is (None if progress else True)
    assert sum(told) == total > 0
    assert len(told) == 21
