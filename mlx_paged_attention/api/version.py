"""The version of the installed package, which the CLI and the server report alike."""

import importlib.metadata


def package_version() -> str:
    return importlib.metadata.version("mlx-paged-attention")
