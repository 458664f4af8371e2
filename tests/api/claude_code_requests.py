"""What Claude Code 2.1 sends in one turn: for a title, a first request, one with what the tool has said.

Seen on a loopback interface, with its experimental betas. The keys and kinds are Claude Code's; the texts are
ours, most tools are left out.
"""

from typing import Any

HEADERS = {
    "accept": "application/json",
    "user-agent": "claude-cli/2.1.197 (external, sdk-cli)",
    "x-app": "cli",
    "x-claude-code-session-id": "0000-session",
    "x-stainless-timeout": "600",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "accept-encoding": "gzip, deflate, br, zstd",
}
_CACHED = {"cache_control": {"type": "ephemeral"}}


def _text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def _billing(version: str) -> dict[str, Any]:
    return _text(f"x-anthropic-billing-header: cc_version=2.1.197.{version}; cc_entrypoint=sdk-cli;")


TOOLS: list[dict[str, Any]] = [
    {
        "name": name,
        "description": f"What {name} does.",
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                required: {"description": "What it is about.", "type": "string", "minLength": 1},
                "timeout": {"type": "number", "exclusiveMinimum": 0},
            },
            "required": [required],
            "additionalProperties": False,
        },
    }
    for name, required in (("Bash", "command"), ("WebFetch", "url"))
]
_SYSTEM = [_text("You are an agent.", **_CACHED), _text("\nYou are helpful.", **_CACHED)]
_ALWAYS: dict[str, Any] = {
    "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"0"}'},
    "max_tokens": 32000,
    "stream": True,
}
_TITLE_SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string"}},
    "required": ["title"],
    "additionalProperties": False,
}
TITLE: dict[str, Any] = {
    "messages": [{"role": "user", "content": [_text("<session>\nrun it\n</session>")]}],
    "system": [_billing("e8f"), _text("You are an agent."), _text("Write a title.")],
    "tools": [],
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": _TITLE_SCHEMA}},
    **_ALWAYS,
}


def _turn(messages: list[dict[str, Any]], version: str) -> dict[str, Any]:
    return {
        "messages": messages,
        "system": [_billing(version), *_SYSTEM],
        "tools": TOOLS,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        **_ALWAYS,
    }


def _begin(**last: Any) -> list[dict[str, Any]]:
    reminder = _text("<system-reminder>\nToday.\n</system-reminder>")
    return [
        {"role": "user", "content": [reminder, _text("run it", **last)]},
        {"role": "system", "content": "Agents: none."},
    ]


FIRST = _turn(_begin(**_CACHED), "132")


def second(answered: list[dict[str, Any]], result: str) -> dict[str, Any]:
    """The request that follows: what was answered, as it comes back, and what came of the call."""
    done = {
        "tool_use_id": answered[-1]["id"],
        "type": "tool_result",
        "content": result,
        "is_error": False,
        **_CACHED,
    }
    turns = [{"role": "assistant", "content": answered}, {"role": "user", "content": [done]}]
    return _turn([*_begin(), *turns], "7a0")
