"""Sampling values that a model's ``generation_config.json`` asks for."""

from collections.abc import Mapping
from typing import Any

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``SamplingParams`` fields for which the model brings its own default.

    ``max_new_tokens`` becomes ``max_tokens``; a value of ``null`` counts as absent.
    """
    values = {name: generation_config.get(name) for name in _FIELDS}
    values["max_tokens"] = generation_config.get("max_new_tokens")
    return {name: value for name, value in values.items() if value is not None}
