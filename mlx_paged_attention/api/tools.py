"""The tools of a request: which are offered, which must be called, with every refusal said once."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_paged_attention.errors import InvalidRequestError

if TYPE_CHECKING:
    from mlx_paged_attention.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a request lets an answer call, as OpenAI's API writes it.

    Attributes:
        offered: go into the prompt, and may be called.
        forced: those of which an answer must call one; empty if it may do without.
        is_named: the request names the function, which is then called once.
    """

    offered: list[dict[str, Any]]
    forced: list[dict[str, Any]]
    is_named: bool = False

    @property
    def is_strict(self) -> bool:
        """The arguments of some function must follow its schema."""
        return any(tool["function"].get("strict") for tool in self.offered)


def tool_choice_of(
    tools: list[dict[str, Any]] | None, tool_choice: str | dict[str, Any] | None, tokenizer: "Tokenizer"
) -> ToolChoice:
    """What may and what must be called; with ``tool_choice="none"`` the prompt shows no tools either.

    Raises:
        InvalidRequestError: they are malformed, or ask for what cannot be promised, or the model has no way
            to call tools.
    """
    names: set[str] = set()
    for index, tool in enumerate(tools or ()):
        name = _check_tool(tool, f"tools[{index}]")
        if name in names:
            raise _error(f"tools[{index}].function.name {name!r} is there twice", "tools")
        names.add(name)
    allowed, forced, is_named = _chosen(tool_choice, names)
    offered = [tool for tool in tools or () if tool["function"]["name"] in allowed]
    if not offered:
        return ToolChoice([], [])
    if not tokenizer.template_reads("tools"):
        raise _error(
            "tools: this model's chat template has no place for them; describe them in a message and parse "
            "the answer yourself, or serve a model that was trained to call tools",
            "tools",
        )
    if tokenizer.answer_format.tool_calls is None:
        raise _error(
            "tools: how this model writes calls is not known here; describe them in a message and parse the "
            "answer yourself",
            "tools",
        )
    return ToolChoice(
        offered, [tool for tool in offered if tool["function"]["name"] in forced], is_named=is_named
    )


def _chosen(tool_choice: Any, names: set[str]) -> tuple[set[str], set[str], bool]:
    """The names of the functions that may be called, of those of which one must be; whether it is named."""
    if tool_choice == "none":
        return set(), set(), False
    if tool_choice is None:
        return names, set(), False
    if not names:
        raise _error("tool_choice is only allowed with tools", "tool_choice")
    if tool_choice in ("auto", "required"):
        return names, names if tool_choice == "required" else set(), False
    kind = tool_choice.get("type") if isinstance(tool_choice, dict) else None
    if kind == "function" and (name := _function_name(tool_choice)) is not None:
        return names, {_known(name, names)}, True
    if kind == "allowed_tools" and isinstance(described := tool_choice.get("allowed_tools"), dict):
        several, mode = described.get("tools"), described.get("mode")
        found = list(map(_function_name, several)) if isinstance(several, list) else [None]
        if mode in ("auto", "required") and found and None not in found:
            allowed = {_known(name, names) for name in found if name is not None}
            return allowed, allowed if mode == "required" else set(), False
    raise _error(
        "tool_choice must be 'none', 'auto', 'required', {'type': 'function', 'function': {'name': ...}} or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto' or 'required', 'tools': "
        "[{'type': 'function', 'function': {'name': ...}}, ...]}}",
        "tool_choice",
    )


def _function_name(choice: Any) -> str | None:
    """The name in ``{"type": "function", "function": {"name": ...}}``; ``None`` if it is something else."""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _known(name: str, names: set[str]) -> str:
    if name not in names:
        raise _error(f"tool_choice names {name!r}, which is not in tools", "tool_choice")
    return name


def _check_tool(tool: dict[str, Any], where: str) -> str:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise _error(f"{where} must be {{'type': 'function', 'function': {{...}}}}", "tools")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise _error(f"{where}.function.name must be a non-empty string", "tools")
    for key, kind in (("description", str), ("parameters", dict)):
        if not isinstance(function.get(key), kind | None):
            what = "a string" if kind is str else "a JSON schema object"
            raise _error(f"{where}.function.{key} must be {what}", "tools")
    if not isinstance(function.get("strict"), bool | None):
        raise _error(f"{where}.function.strict must be true or false", "tools")
    return name


def _error(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param)
