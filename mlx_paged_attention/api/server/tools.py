"""The tools of a request: which are offered, checked, with every refusal said once."""

from typing import TYPE_CHECKING, Any

from mlx_paged_attention.errors import InvalidRequestError

if TYPE_CHECKING:
    from mlx_paged_attention.text.tokenizer import Tokenizer


def shown_tools(
    tools: list[dict[str, Any]] | None, tool_choice: str | dict[str, Any] | None, tokenizer: "Tokenizer"
) -> list[dict[str, Any]]:
    """The tools that go into the prompt; with ``tool_choice="none"`` none do, and so none are called.

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
    if tool_choice not in (None, "none"):
        _check_choice(tool_choice, names)
    if not tools or tool_choice == "none":
        return []
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
    return tools


def _check_choice(tool_choice: Any, names: set[str]) -> None:
    if not names:
        raise _error("tool_choice is only allowed with tools", "tool_choice")
    if tool_choice != "auto":
        _refuse_forced(tool_choice, names)


def _refuse_forced(tool_choice: Any, names: set[str]) -> None:
    function = tool_choice.get("function") if isinstance(tool_choice, dict) else None
    if isinstance(function, dict) and tool_choice.get("type") == "function":
        name = function.get("name")
        if not isinstance(name, str) or name not in names:
            raise _error(f"tool_choice names {name!r}, which is not in tools", "tool_choice")
    elif tool_choice != "required":
        raise _error(
            "tool_choice must be 'none', 'auto', 'required' or "
            "{'type': 'function', 'function': {'name': ...}}",
            "tool_choice",
        )
    raise _error(
        "a tool call cannot be forced yet: send tool_choice 'auto' and ask for the call in a message",
        "tool_choice",
    )


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
    if function.get("strict"):
        raise _error(
            f"{where}.function.strict: arguments cannot be forced to follow the schema yet; "
            "leave it out and check them",
            "tools",
        )
    return name


def _error(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param)
