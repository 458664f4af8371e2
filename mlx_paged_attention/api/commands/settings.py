"""Settings: the flags and environment variables there are, and errors about them in a person's own words."""

import re
from collections.abc import Iterable, Mapping, Sequence

from cyclopts import App

from mlx_paged_attention.errors import InvalidRequestError

PREFIX = "MLX_PAGED_"
# Read where there is no command line: on import, and by scripts.
OTHER_VARIABLES = ("MLX_PAGED_CACHE", "MLX_PAGED_BLAS")

_FIELD = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")  # "model" and "stop" are words too, "max_tokens" is none


class Settings:
    """The flags of all commands, each of which may be set in the environment."""

    def __init__(self, app: App, commands: Iterable[str]) -> None:
        self._flags: dict[str, tuple[str, ...]] = {}  # by field: its spellings, the usual one first
        for command in commands:
            for argument in app[command].assemble_argument_collection():
                names = tuple(name for name in (*argument.names, *argument.negatives) if name[:2] == "--")
                if names:
                    self._flags[names[0][2:].replace("-", "_")] = names

    def unknown_variables(self, environment: Iterable[str]) -> list[str]:
        """The variables of ours that nothing reads, sorted."""
        known = {_variable(flag) for names in self._flags.values() for flag in names}
        ours = {name for name in environment if name.startswith(PREFIX)}
        return sorted(ours - known - set(OTHER_VARIABLES))

    def in_own_words(
        self, error: InvalidRequestError, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> str:
        """The message, with flags in place of fields, and the one in question as it was given.

        ``kv_memory (900000000000) asks for …`` becomes ``--kv-memory 900GB asks for …``, or
        ``MLX_PAGED_KV_MEMORY=900GB asks for …``.
        """
        message, field = str(error), error.param
        if field not in self._flags:
            return self._with_flags(message)
        name, value = self._given(field, arguments, environment)
        match = re.fullmatch(rf"{field}( \(.*?\))? (.*)", message, re.DOTALL)
        if match is None:
            message = self._with_flags(message)
            return message if name in message else f"{name}: {message}"
        number = match[1] or ""
        if number and value is not None:
            number = f"={value}" if name.startswith(PREFIX) else f" {value}"
        return f"{name}{number} {self._with_flags(match[2])}"

    def _with_flags(self, message: str) -> str:
        return _FIELD.sub(lambda match: self._flags.get(match[0], (match[0],))[0], message)

    def _given(
        self, field: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[str, str | None]:
        """What the field was set by, and to which text."""
        for position, argument in enumerate(arguments):
            flag, equals, value = argument.partition("=")
            if flag in self._flags[field]:
                return flag, value if equals else next(iter(arguments[position + 1 :]), None)
        for flag in self._flags[field]:
            if (variable := _variable(flag)) in environment:
                return variable, environment[variable]
        return self._flags[field][0], None


def _variable(flag: str) -> str:
    return PREFIX + flag[2:].replace("-", "_").upper()
