"""What Qwen Code 0.24 sends in one turn: a first request, and one with the output of the tool it ran.

Seen on a loopback interface. The keys and kinds are Qwen Code's; the texts are ours, most tools are left out.
"""

from typing import Any

HEADERS = {
    "accept": "application/json",
    "user-agent": "QwenCode/0.24.4 (linux; x64)",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "accept-language": "*",
    "sec-fetch-mode": "cors",
    "accept-encoding": "gzip, deflate",
}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "run_shell_command",
            "description": "Runs a command.",
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "string", "description": "What to run."},
                    "is_background": {"type": "boolean", "description": "Whether to wait."},
                    "timeout": {"type": "integer", "minimum": 1, "maximum": 600000},
                },
                "required": ["command"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "agent",
            "description": "Starts a helper.",
            "parameters": {
                "type": "object",
                "properties": {
                    "turns": {
                        "oneOf": [
                            {"type": "string", "enum": ["all"]},
                            {"type": "string", "pattern": "^[1-9]$"},
                        ]
                    }
                },
            },
        },
    },
    {"type": "function", "function": {"name": "list_agents", "description": "Takes nothing."}},
]

FIRST: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "You are a coding agent."},
        {
            "role": "user",
            "content": [_text("<system-reminder>Skills.</system-reminder>"), _text("run it")],
        },
    ],
    "max_tokens": 32000,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": TOOLS,
}


def second(reasoning: str, text: str, calls: list[dict[str, Any]], result: str) -> dict[str, Any]:
    """The request that follows: what was answered, as it comes back, and what came of the call."""
    turn = {"role": "assistant", "content": text, "tool_calls": calls, "reasoning_content": reasoning}
    done = {"role": "tool", "tool_call_id": calls[0]["id"], "content": [_text(result)]}
    return {**FIRST, "messages": [*FIRST["messages"], turn, done]}
