import pytest

from mlx_paged_attention.models.source import ModelSource, resolve


@pytest.fixture(scope="session")
def smollm2_source() -> ModelSource:
    """The default model, fetched once."""
    return resolve(None, progress=False)
