import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from mlx_paged_attention.models.source import ModelSource, resolve


@pytest.fixture(scope="session")
def smollm2_source() -> ModelSource:
    """The default model, fetched once."""
    return resolve(None, progress=False)


@pytest.fixture(scope="session")
def stub_packages() -> Iterator[None]:
    """Stands in for a package that one of mlx-lm's files demands, without which it ends the process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "hf_olmo", ModuleType("hf_olmo"))
        yield
