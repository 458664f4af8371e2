"""StructuredOutputsParams: the form that an answer must have."""

import json as json_text
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mlx_paged_attention.errors import InvalidRequestError

# What messages call a form if its caller has no other name for it.
FIELD = "structured_outputs"


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
        named: what the caller calls it, for messages.
        composed: the grammar holds what the caller asked for; its lines are not the caller's.

    Raises:
        InvalidRequestError: none or several are given, or one is of the wrong type.
    """

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    named: str = field(default=FIELD, repr=False, compare=False)
    composed: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            what = f"{' and '.join(given)} were" if given else "none of them was"
            raise self._refused(f"give exactly one of {', '.join(_FORMS)}; {what} given")
        if self.json is not None and not isinstance(self.schema, dict):
            raise self._refused("json must be a JSON schema: an object, or the text of one")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise self._refused(f"{name} must be a text that is not empty")
        if not isinstance(self.json_object, bool | None):
            raise self._refused("json_object must be true or left out")
        if self.choice is not None:
            several = isinstance(self.choice, Sequence) and not isinstance(self.choice, str) and self.choice
            if not several or not all(isinstance(text, str) and text for text in self.choice):
                raise self._refused("choice must be a list of texts that are not empty")

    @property
    def schema(self) -> Any:
        """``json`` as an object.

        Raises:
            InvalidRequestError: it is a text that is no JSON.
        """
        if not isinstance(self.json, str):
            return self.json
        try:
            return json_text.loads(self.json)
        except (ValueError, RecursionError) as error:
            raise self._refused(f"json is not valid JSON: {error}") from None

    def _refused(self, reason: str) -> InvalidRequestError:
        return refused(reason, self.named)


_FORMS = tuple(field.name for field in fields(StructuredOutputsParams) if field.compare)


def structured_outputs(value: Any, named: str = FIELD) -> StructuredOutputsParams:
    """The parameters themselves, or a dict of them.

    Raises:
        InvalidRequestError: it is neither, has a name that is not known, or as the class.
    """
    if isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, dict):
        raise refused(f"must be a StructuredOutputsParams or a dict, not {type(value).__name__}", named)
    for name in value:
        if name not in _FORMS:
            known = ", ".join(_FORMS)
            raise refused(f"{str(name)[:100]!r} is not supported; give exactly one of {known}", named)
    return StructuredOutputsParams(**value, named=named)


def refused(reason: str, named: str = FIELD) -> InvalidRequestError:
    """The error of a form that cannot be enforced."""
    return InvalidRequestError(f"{named}: {reason}", named)
