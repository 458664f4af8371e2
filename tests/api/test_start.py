"""What is refused before a model is loaded."""

import json

import pytest
from models.gguf_files import write_gguf

import mlx_paged_attention.api.start as start
from mlx_paged_attention import LLM
from mlx_paged_attention.errors import InvalidRequestError


@pytest.fixture
def model(tiny_model, tmp_path, monkeypatch):
    """The directory of a model whose loading would fail a test."""
    monkeypatch.setattr(start, "AsyncEngine", None)
    (tmp_path / "model").mkdir()
    for file in tiny_model("llama").iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)
    return tmp_path / "model"


def refusal(path, max_model_len):
    with pytest.raises(InvalidRequestError) as caught:
        LLM(model=str(path), skip_tokenizer_init=True, max_model_len=max_model_len)
    assert caught.value.param == "max_model_len"
    return str(caught.value)


def test_a_length_beyond_the_models_is_refused_unloaded(model):
    assert refusal(model, 8193) == "max_model_len (8193) exceeds the 8192 tokens the model was made for"
    with pytest.raises(TypeError):  # as far as loading
        LLM(model=str(model), skip_tokenizer_init=True, max_model_len=8192)


def test_so_is_one_beyond_a_gguf_files(model, tmp_path):
    write_gguf(model, tmp_path / "model.gguf")
    assert "exceeds the 8192 tokens" in refusal(tmp_path / "model.gguf", 8193)


def test_so_is_one_beyond_what_is_assumed_where_nothing_is_stated(model):
    config = json.loads((model / "config.json").read_text())
    del config["max_position_embeddings"]
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config))
    assert "exceeds the 4096 tokens" in refusal(model, 4097)
