"""Codex's own requests, answered by a scripted model."""

import json
from typing import Any

import httpx
from codex_requests import FIRST, HEADERS, second
from scripted_llm import ScriptedLLM

from mlx_paged_attention.api.server.app import create_app

CALL = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "echo hi"}}\n</tool_call>'


async def test_a_turn_with_a_tool_goes_through() -> None:
    llm = ScriptedLLM(["<think>Run it.</think>", "I will.", CALL])
    app = create_app(llm)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        events = await post(client, FIRST)
        kinds = [event["type"] for event in events]
        assert "response.reasoning_summary_text.delta" in kinds
        output = events[-1]["response"]["output"]
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
        assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
        assert json.loads(output[-1]["arguments"]) == {"cmd": "echo hi"}
        first_prompt = bytes(llm.prompts[-1]).decode()
        await post(client, second(output, "hi\n"))
    assert len(app.state.response_store) == 0
    system = "You are a coding agent.\n\n<skills>None.</skills><permissions>All.</permissions>"
    environment = "<environment_context><shell>bash</shell></environment_context>"
    begin = f"<system>{system}<user>{environment}<user>say hi"
    tools = "<assistant>[tools=exec_command,write_stdin,get_goal]"
    assert first_prompt == begin + tools
    assert bytes(llm.prompts[-1]).decode() == f"{begin}<assistant>I will.<tool>hi\n{tools}"


async def post(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await client.post("/v1/responses", json=body, headers=HEADERS)
    assert response.status_code == 200, response.text
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    assert events[-1]["type"] == "response.completed"
    return events
