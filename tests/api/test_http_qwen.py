"""Qwen Code's own requests, answered by a scripted model."""

import json
from typing import Any

import httpx
from qwen_requests import FIRST, HEADERS, second
from scripted_llm import ScriptedLLM

from mlx_paged_attention.api.server.app import create_app

CALL = '<tool_call>\n{"name": "run_shell_command", "arguments": {"command": "echo hi"}}\n</tool_call>'


async def test_a_turn_with_a_tool_goes_through() -> None:
    llm = ScriptedLLM(["<think>Run it.</think>", "I will.", CALL])
    transport = httpx.ASGITransport(create_app(llm), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        choices, usage = await post(client, FIRST)
        prompts = [bytes(llm.prompts[-1]).decode()]
        assert usage["prompt_tokens"] == len(llm.prompts[-1])
        assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
        deltas = [choice["delta"] for choice in choices]
        assert deltas[0]["role"] == "assistant"
        reasoning, text = (
            "".join(delta.get(name, "") for delta in deltas) for name in ("reasoning_content", "content")
        )
        assert (reasoning, text) == ("Run it.", "I will.")
        begin, arguments = (call for delta in deltas for call in delta.get("tool_calls", []))
        assert begin["index"] == arguments["index"] == 0
        assert choices[-1]["finish_reason"] == "tool_calls"
        # Qwen Code writes the arguments anew.
        given = json.dumps(json.loads(arguments["function"]["arguments"]), separators=(",", ":"))
        function = {"name": begin["function"]["name"], "arguments": given}
        call = {"id": begin["id"], "type": "function", "function": function}
        await post(client, second(reasoning, text, [call], "Output: hi"))
        prompts.append(bytes(llm.prompts[-1]).decode())
    head = "<system>You are a coding agent.<user><system-reminder>Skills.</system-reminder>run it"
    tools = "<assistant>[tools=run_shell_command,agent,list_agents]"
    assert prompts == [head + tools, f"{head}<assistant>I will.<tool>Output: hi{tools}"]


async def post(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The choices of all chunks, and the usage in the last one."""
    response = await client.post("/v1/chat/completions", json=body, headers=HEADERS)
    assert response.status_code == 200, response.text
    *lines, last = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert last == "[DONE]"
    *chunks, end = [json.loads(line) for line in lines]
    assert end["choices"] == []
    return [choice for chunk in chunks for choice in chunk["choices"]], end["usage"]
