"""What Codex 0.171 sends in one turn: a first request, and a second one with the output of the tool it ran.

Seen on a loopback interface. The keys and kinds are Codex's; the texts are ours, some tools are left out.
"""

from typing import Any

HEADERS = {
    "accept": "text/event-stream",
    "session-id": "0000-session",
    "thread-id": "0000-session",
    "x-client-request-id": "0000-session",
    "x-codex-beta-features": "remote_compaction_v2",
    "x-codex-window-id": "0000-session:0",
    "originator": "codex_exec",
    "accept-encoding": "zstd,gzip",
}


def _function(name: str, required: list[str]) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": key} for key in [*required, "justification"]}
    return {
        "type": "function",
        "name": name,
        "description": f"What {name} does.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        },
    }


def _message(role: str, *texts: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": f"msg_{role}", "role": role, "content": content}


TOOLS: list[dict[str, Any]] = [
    _function("exec_command", ["cmd"]),
    _function("write_stdin", ["session_id"]),
    _function("get_goal", []),
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Sub-agents.",
        "tools": [_function("spawn_agent", ["message"]), _function("wait_agent", ["targets"])],
    },
    {"type": "web_search", "external_web_access": True},
]

FIRST: dict[str, Any] = {
    "stream": True,
    "input": [
        _message("developer", "You are a coding agent."),
        _message("developer", "<skills>None.</skills>", "<permissions>All.</permissions>"),
        _message("user", "<environment_context><shell>bash</shell></environment_context>"),
        _message("user", "say hi"),
    ],
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0000-session",
    "client_metadata": {"session_id": "0000-session", "x-codex-turn-metadata": '{"turn_id":"0000"}'},
}


def second(output: list[dict[str, Any]], result: str) -> dict[str, Any]:
    """The request that follows: what was answered, as Codex sends it back, and what came of the call."""
    items: list[dict[str, Any]] = []
    for item in output:
        match item["type"]:
            case "reasoning":
                items.append({"type": "reasoning", "id": item["id"], "summary": item["summary"]})
                items[-1]["encrypted_content"] = item["encrypted_content"]
            case "message":
                keys = ("type", "status", "id", "role", "content")
                items.append({key: item[key] for key in keys})
            case "function_call":
                keys = ("type", "status", "id", "name", "arguments", "call_id")
                items.append({key: item[key] for key in keys})
                done = {"type": "function_call_output", "call_id": item["call_id"], "output": result}
    return {**FIRST, "input": [*FIRST["input"], *items, {"id": "fco_0", **done}]}
