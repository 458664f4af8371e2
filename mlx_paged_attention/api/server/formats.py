"""The form that an answer must have, in the words of every client: OpenAI's, vLLM's, vLLM's older ones."""

from typing import Any

from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.structured_outputs import (
    StructuredOutputsParams,
    refused,
    structured_outputs,
)

_RESPONSE_FORMAT = "response_format"

# What older clients of vLLM send, and the name of today.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def requested_format(fields: dict[str, Any]) -> StructuredOutputsParams | None:
    """What the fields of a request ask for; at most one of them may.

    Args:
        fields: by name: ``structured_outputs``, ``response_format``, ``guided_*``; ``None`` is "not given".

    Raises:
        InvalidRequestError: a field is malformed, or two ask for a form.
    """
    asked = {}
    for name, value in fields.items():
        form = None if value is None else _form(name, value)
        if form is not None:
            asked[name] = form
    if len(asked) > 1:
        first, second, *_ = asked
        raise InvalidRequestError(f"{first} and {second} both say how to answer; send one of them", second)
    return next(iter(asked.values()), None)


def _form(name: str, value: Any) -> StructuredOutputsParams | None:
    if name == _RESPONSE_FORMAT:
        return _response_format(value)
    return structured_outputs({GUIDED[name]: value} if name in GUIDED else value, name)


def _response_format(value: Any) -> StructuredOutputsParams | None:
    """OpenAI's field. A schema is always enforced, whether or not it says ``strict``."""
    kind = value.get("type") if isinstance(value, dict) else None
    keys = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
    if not isinstance(kind, str) or kind not in keys:
        raise _refused("its type must be 'text', 'json_object' or 'json_schema'")
    _only(value, keys[kind])
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True, named=_RESPONSE_FORMAT)
    described = value.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise _refused("json_schema must be an object with the schema under 'schema'")
    _only(described, {"name", "description", "schema", "strict"})
    if not isinstance(described.get("strict"), bool | None):
        raise _refused("json_schema.strict must be true or false")
    return StructuredOutputsParams(json=described["schema"], named=_RESPONSE_FORMAT)


def _only(value: dict[str, Any], known: set[str]) -> None:
    for key in value:
        if key not in known:
            raise _refused(f"{str(key)[:100]!r} is not supported here")


def _refused(reason: str) -> InvalidRequestError:
    return refused(reason, _RESPONSE_FORMAT)
