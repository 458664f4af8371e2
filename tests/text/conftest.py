import pytest

from mlx_paged_attention.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    """The default model's tokenizer."""
    from mlx_paged_attention.models.default_model import fetch_default_model
    from mlx_paged_attention.models.gguf_header import read_gguf_header

    return Tokenizer.from_gguf(read_gguf_header(fetch_default_model()).metadata)
