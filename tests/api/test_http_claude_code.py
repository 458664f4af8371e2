"""Claude Code's own requests, answered by a scripted model."""

import json
from typing import Any

import httpx
from claude_code_requests import FIRST, HEADERS, TITLE, second
from scripted_llm import ScriptedLLM

from mlx_paged_attention.api.server.app import create_app

CALL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo hi"}}\n</tool_call>'


async def test_a_turn_with_a_tool_goes_through() -> None:
    llm = ScriptedLLM(["<think>Run it.</think>", "I will.", CALL], reads=("tools", "enable_thinking"))
    async with connect(llm) as client:
        blocks, reason = await post(client, FIRST)
        assert reason == "tool_use"
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
        assert blocks[0]["thinking"] == "Run it."
        assert blocks[-1]["input"] == {"command": "echo hi"}
        first = bytes(llm.prompts[-1]).decode()
        await post(client, second(blocks, "hi"))
    again = bytes(llm.prompts[-1]).decode()
    head, tools = first.split("<assistant>")
    assert "billing" not in head
    assert head.startswith("<system>You are an agent.\n\nYou are helpful.<user>")
    assert head.endswith("Agents: none.\n</system-reminder>")
    assert tools == "[enable_thinking=True][tools=Bash,WebFetch]"
    # So all of the first prompt is found in the prefix cache.
    assert again == f"{head}<assistant>I will.<tool>hi<assistant>{tools}"


async def test_a_title_comes_as_its_schema_says() -> None:
    llm = ScriptedLLM(['{"title": ', '"Run it"}'])
    async with connect(llm) as client:
        blocks, reason = await post(client, TITLE)
    assert reason == "end_turn"
    assert json.loads(blocks[0]["text"]) == {"title": "Run it"}
    assert llm.params[-1].structured_outputs is not None


def connect(llm: ScriptedLLM) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(llm), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


async def post(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[Any], str]:
    """The blocks of the answer, put together as the events say, and why it stopped."""
    response = await client.post("/v1/messages?beta=true", json=body, headers=HEADERS)
    assert response.status_code == 200, response.text
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    blocks: list[Any] = []
    for event in events:
        match event:
            case {"type": "content_block_start"}:
                blocks.append(event["content_block"])
            case {"delta": {"type": "input_json_delta", "partial_json": text}}:
                blocks[event["index"]]["input"] = json.loads(text)
            case {"type": "content_block_delta", "delta": {"type": _, **new}}:
                for name, text in new.items():
                    blocks[event["index"]][name] = blocks[event["index"]].get(name, "") + text
    return blocks, events[-2]["delta"]["stop_reason"]
