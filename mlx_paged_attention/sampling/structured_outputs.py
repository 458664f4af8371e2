"""StructuredOutputsParams: the form that an answer must have."""

import json as json_text
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from mlx_paged_attention.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer must look like, from its first character to its last. Exactly one is given.

    Attributes:
        json: a JSON schema, as an object or as text. The names are vLLM's.
        json_object: any JSON object.
        regex: a regular expression that matches the whole answer: Rust's syntax, no look-around and no
            back-references; ``\\d`` and ``\\w`` are ASCII, as in JSON schemas.
        choice: the answer is one of these texts.
        grammar: a context-free grammar in the Lark dialect of llguidance; the answer is its ``start``.

    Raises:
        InvalidRequestError: none or several are given, or one is of the wrong type.
    """

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        names = [field.name for field in fields(self)]
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            what = f"{' and '.join(given)} were" if given else "none of them was"
            raise _refused(f"give exactly one of {', '.join(names)}; {what} given")
        if self.json is not None:
            schema = parsed(self.json) if isinstance(self.json, str) else self.json
            if not isinstance(schema, dict):
                raise _refused("json must be a JSON schema: an object, or the text of one")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _refused(f"{name} must be a text that is not empty")
        if self.json_object not in (None, True, False):
            raise _refused("json_object must be true or left out")
        if self.choice is not None:
            several = isinstance(self.choice, Sequence) and not isinstance(self.choice, str) and self.choice
            if not several or not all(isinstance(text, str) and text for text in self.choice):
                raise _refused("choice must be a list of texts that are not empty")


def structured_outputs(value: Any) -> StructuredOutputsParams:
    """The parameters themselves, or a dict of them.

    Raises:
        InvalidRequestError: it is neither, has a name that is not known, or as the class.
    """
    if isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, dict):
        raise _refused(f"must be a StructuredOutputsParams or a dict, not {type(value).__name__}")
    known = [field.name for field in fields(StructuredOutputsParams)]
    for name in value:
        if name not in known:
            raise _refused(f"{str(name)[:100]!r} is not supported; give exactly one of {', '.join(known)}")
    return StructuredOutputsParams(**value)


def parsed(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        InvalidRequestError: it is none.
    """
    try:
        return json_text.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(f"json is not valid JSON: {error}") from None


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {reason}", "structured_outputs")
