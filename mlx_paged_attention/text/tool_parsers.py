"""Parsers of complete tool calls: mlx-lm's, three of our own, and what every parser's result must satisfy."""

import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_PRIVATE_NAME = f"{__name__}_of_mlx_lm"


@dataclass(frozen=True, slots=True)
class Call:
    """A call as the model wrote it.

    Attributes:
        arguments: the text of a JSON object.
        call_id: the model's, if its format has ids.
    """

    name: str
    arguments: str
    call_id: str | None = None


def read_calls(
    parse: Callable[[str, Any], Any], body: str, tools: Sequence[Mapping[str, Any]]
) -> list[Call] | None:
    """The calls in a complete body; ``None`` if it is malformed, or calls what was not offered."""
    functions = [{"parameters": {}, **tool["function"]} for tool in tools]
    offered = {function["name"] for function in functions}
    try:
        parsed = parse(body, [{"type": "function", "function": function} for function in functions])
        calls = [_call(item) for item in (parsed if isinstance(parsed, list) else [parsed])]
    except Exception:  # Whatever a parser makes of a model's mistakes, the text is shown in its place.
        return None
    return calls if calls and all(call.name in offered for call in calls) else None


def _call(parsed: Any) -> Call:
    name, call_id = parsed["name"], parsed.get("id")
    if not isinstance(name, str):
        raise ValueError("the name is no text")
    arguments = parsed.get("arguments", parsed.get("parameters"))
    return Call(name, _arguments(arguments), call_id if isinstance(call_id, str) and call_id else None)


def _arguments(value: Any) -> str:
    if isinstance(value, str):
        value = _object_in(value)
    if value is not None and not isinstance(value, dict):
        raise ValueError("arguments must be an object")
    value = _within_range(value or {})
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, spelled as an escape
        text = json.dumps(value, allow_nan=False)
    return text


def _object_in(text: str) -> dict[str, Any]:
    """Arguments that a model has written as a JSON text in JSON; what is no object is put into one.

    So what tools are called with, and what clients send back in the next turn, is an object always.
    """
    if not text.strip():
        return {}
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _within_range(value: Any) -> Any:
    """The same with numbers such as 1e999, which is JSON, as the nearest that clients can read."""
    if isinstance(value, dict):
        return {key: _within_range(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_within_range(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return math.copysign(sys.float_info.max, value)
    return value


def parser_of_mlx_lm(name: str) -> Any:
    """A module of ``mlx_lm.tool_parsers``, imported without mlx-lm's own start, which would import MLX.

    Its interface: ``tool_call_start``, ``tool_call_end``, ``parse_tool_call(text, tools)``.
    """
    package = importlib.util.find_spec("mlx_lm")
    assert package is not None, "mlx-lm is installed with this package"
    assert package.submodule_search_locations, "mlx-lm is a package"
    folder = Path(package.submodule_search_locations[0]) / "tool_parsers"
    if _PRIVATE_NAME not in sys.modules:  # some of the parsers import each other, relative to their package
        _load(_PRIVATE_NAME, folder / "__init__.py", package=True)
    full_name = f"{_PRIVATE_NAME}.{name}"
    return sys.modules.get(full_name) or _load(full_name, folder / f"{name}.py")


def _load(name: str, file: Path, *, package: bool = False) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(file.parent)] if package else None
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def parse_json(text: str, tools: Any = None) -> Any:
    """Hermes and Qwen: ``{"name": ..., "arguments": {...}}``."""
    return json.loads(text)


def parse_llama3(text: str, tools: Any = None) -> list[Any]:
    """Llama 3: ``{"name": ..., "parameters": {...}}``, several with ``;`` between them."""
    decoder = json.JSONDecoder()
    calls, at = [], 0
    text = text.strip()
    while at < len(text):
        item, at = decoder.raw_decode(text, at)
        if isinstance(item.get("function"), str):
            item["name"] = item["function"]
        calls.append(item)
        between = re.compile(r"[\s;]*").match(text, at)
        assert between is not None
        at = between.end()
    return calls


_DEEPSEEK_CALL = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n(?P<fenced>.*?)\n```"
    r"|(?P<plain>[^<]+?)<｜tool▁sep｜>(?P<arguments>.*?))\s*<｜tool▁call▁end｜>\s*",
    re.DOTALL,
)


def parse_deepseek(text: str, tools: Any = None) -> list[Any]:
    """DeepSeek V3 and R1 (fenced JSON after the name) and V3.1 (bare JSON)."""
    calls, at = [], 0
    while at < len(text):
        found = _DEEPSEEK_CALL.match(text, at)
        if found is None:
            raise ValueError("not a call")
        name, arguments = found["name"] or found["plain"], found["fenced"] or found["arguments"]
        calls.append({"name": name.strip(), "arguments": json.loads(arguments)})
        at = found.end()
    return calls


_HARMONY_CALL = re.compile(r"(?P<name>[^\s<]+)[^{]*?<\|message\|>(?P<arguments>.*)", re.DOTALL)


def parse_harmony(text: str, tools: Any = None) -> Any:
    """gpt-oss: the name, whose channel and type may follow, and a message of JSON."""
    found = _HARMONY_CALL.fullmatch(text)
    if found is None:
        raise ValueError("not a call")
    return {"name": found["name"], "arguments": json.loads(found["arguments"])}
