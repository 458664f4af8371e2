"""Words that the rows of tiny configurations share."""

from collections.abc import Mapping
from typing import Any

from tiny_models import COMMON, WINDOW

__all__ = ["FULL", "LINEAR", "SLIDING", "WINDOW", "text_config"]

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def text_config(model_type: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a model that also sees or hears, its language model within."""
    return {"text_config": {**COMMON, "model_type": model_type, **entries}}
