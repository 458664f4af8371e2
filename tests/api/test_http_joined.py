"""For every endpoint and feature: a joined stream is the answer that is sent whole. On the real engine."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from scripted_model import chain, write_scripted_model
from small_vocabularies import byte_level, piece_ids

from mlx_paged_attention.api.async_llm import AsyncLLM
from mlx_paged_attention.api.server.app import create_app
from mlx_paged_attention.api.server.protocol import CompletionRequest

END = "<end>"
# Reasoning, a character in two tokens, text with a stop string across tokens, two calls. Every piece once.
SAID = [
    *(b"<think>", b"\nHm", b" \xc3", b"\xa9.", b"\n</", b"think>", b"\n\nLet", b" m", b"e s", b"ee.\n"),
    *(b"<tool_", b"call>\n", b'{"name": "f", ', b'"arguments"', b': {"a": ', b'"x y"', b"}}\n"),
    *(b"</tool_call>\n", b"<tool_call>", b'{"name":"g",', b'"arguments":{', b"}}", b"</tool_", b"call>"),
]
PLAIN = [b"Caf", b"\xc3", b"\xa9 ", b"is one", b", tea", b" is t", b"wo. ", b'{"', b'k"', b": 1", b"}"]
MARKERS = [b"</think>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content }}{{ '' if loop.last else '|' }}{% endfor %}"
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '!' if plain else '?' }}{% endif %}"
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")
]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}}, "required": ["a"]}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    path = tmp_path_factory.mktemp("scripted")
    backend = byte_level(*SAID, *PLAIN, *MARKERS, special=(END,))
    end = backend.token_to_id(END)
    said, plain = piece_ids(backend, SAID), piece_ids(backend, PLAIN)
    follow = chain(None, *said, end) | chain(ord("!"), *plain, end)
    write_scripted_model(path, follow, vocab_size=backend.get_vocab_size(), eos_token_id=end)
    backend.save(str(path / "tokenizer.json"))
    config = {"eos_token": END, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    llm = AsyncLLM(str(path), num_blocks=256, max_num_seqs=16, max_model_len=256)
    yield llm
    llm.close()


@pytest.fixture
async def client(llm: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(llm), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server/v1", timeout=60) as client:
        yield client


async def whole(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    events = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The chunks of either endpoint, put together as a client does that knows nothing of ours."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            delta = part.get("delta") or {"content": part.get("text")}
            empty = {"content": "", "reasoning": "", "calls": [], "logprobs": {}}
            choice = choices.setdefault(part["index"], empty)
            assert "finish_reason" not in choice, "something came after the end"
            choice["content"] += delta.get("content") or ""
            choice["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if call.get("id"):
                    choice["calls"].append([call["function"]["name"], ""])
                choice["calls"][call["index"]][1] += call["function"].get("arguments", "")
            for name, values in lists(part["logprobs"]).items():
                choice["logprobs"].setdefault(name, []).extend(values)
            if part["finish_reason"] is not None:
                choice["finish_reason"], choice["stop_reason"] = part["finish_reason"], part["stop_reason"]
    usage = chunks[-1]["usage"]
    assert chunks[-1]["choices"] == []
    return {"choices": choices, "usage": sums(usage)}


def as_joined(answer: dict[str, Any]) -> dict[str, Any]:
    choices = {}
    for choice in answer["choices"]:
        message = choice.get("message") or {"content": choice["text"]}
        choices[choice["index"]] = {
            "content": message["content"] or "",
            "reasoning": message.get("reasoning_content", ""),
            "calls": [list(call["function"].values()) for call in message.get("tool_calls", [])],
            "logprobs": lists(choice["logprobs"]),
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
    return {"choices": choices, "usage": sums(answer["usage"])}


def lists(logprobs: dict[str, Any] | None) -> dict[str, list[Any]]:
    """Without those that are null."""
    return {name: values for name, values in (logprobs or {}).items() if values is not None}


def sums(usage: dict[str, Any]) -> dict[str, Any]:
    """Without what depends on who came before."""
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


BOTH: dict[str, dict[str, Any]] = {
    "plain": {},
    "several answers": {"n": 3},
    "a stop string across tokens": {"stop": ["me see", "zzz"]},
    "a stop string that is kept": {"stop": "e s", "include_stop_str_in_output": True},
    "a stop string from its half": {"stop": "see.\n<never"},
    "a stop token": {"stop_token_ids": [ord("x"), 264]},
    "penalties and bias": {"repetition_penalty": 1.2, "logit_bias": {"97": 8, "98": 7.5}, "top_k": 5},
    "bad words and few tokens": {"bad_words": ["Hm"], "min_p": 0.01, "min_tokens": 3},
    "a choice": {"structured_outputs": {"choice": ["<think>no", "yes", "y\u00e9"]}},
    "a schema": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 60},
    "an object": {"response_format": {"type": "json_object"}, "max_tokens": 40},
    "a regex": {"guided_regex": "(\u00e9|\u20ac){3,9}"},
    "a grammar": {"guided_grammar": 'start: "<think>" "x"+ "</think>" "y"'},
    "past the end": {"ignore_eos": True, "max_tokens": 60},
    **{f"{cut} tokens": {"max_tokens": cut} for cut in range(1, len(SAID) + 1)},
}
CHAT: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "logprobs of several": {"logprobs": True, "n": 2, "top_logprobs": 0, "tools": TOOLS},
    "tools": {"tools": TOOLS},
    "tools one at a time": {"tools": TOOLS, "parallel_tool_calls": False},
    "tools for several": {"tools": TOOLS, "n": 3},
    "tools until a stop": {"tools": TOOLS, "stop": ["x y"]},
    "a template variable": {"chat_template_kwargs": {"plain": True}, "tools": TOOLS},
    "a message continued": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b"}],
        "continue_final_message": True,
    },
    **{f"tools, {cut} tokens": {"max_tokens": cut, "tools": TOOLS} for cut in range(5, len(SAID) + 1)},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "another script": {"prompt": "go!"},
    "echo": {"echo": True, "n": 2},
    "echo and logprobs": {"echo": True, "logprobs": 2, "prompt": "caf\u00e9!"},
    "the prompt alone": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "logprobs": {"logprobs": 3, "n": 2},
    "several prompts": {"prompt": ["a?", "b!", "c"], "n": 2, "logprobs": 0},
    "token ids": {"prompt": [[97, 63], [98, 33]], "echo": True},
}
MODES = {"greedy": {"temperature": 0}, "seeded": {"temperature": 1.0, "seed": 11}}
CASES = [
    pytest.param(path, {**asked, **mode, **feature}, id=f"{path} {kind} {name}")
    for path, asked, own in (
        ("/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}, CHAT),
        ("/completions", {"prompt": "go", "max_tokens": 40}, COMPLETIONS),
    )
    for kind, mode in MODES.items()
    for name, feature in {**BOTH, **own}.items()
]


@pytest.mark.parametrize(("path", "body"), CASES)
async def test_a_joined_stream_is_the_whole_answer(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    chunks = await stream(client, path, body)
    answer = await whole(client, path, body)
    assert joined(chunks) == as_joined(answer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("feature", BOTH)
async def test_a_joined_stream_is_what_the_engine_says_in_the_end(
    client: httpx.AsyncClient, llm: AsyncLLM, feature: str, mode: str
) -> None:
    body = {"prompt": "go", "max_tokens": 40, **MODES[mode], **BOTH[feature]}
    streamed = joined(await stream(client, "/completions", body))["choices"]
    params = CompletionRequest(**body).sampling_params({})
    async for output in llm.generate("go", params, output_kind="final"):
        for answer in output.outputs:
            choice = streamed[answer.index]
            assert choice["content"] == answer.text
            assert (choice["finish_reason"], choice["stop_reason"]) == (
                answer.finish_reason,
                answer.stop_reason,
            )
        assert len(output.outputs) == len(streamed)


async def test_prompt_logprobs_equal_those_of_an_echo(client: httpx.AsyncClient) -> None:
    """They are for whole answers only; a streamed echo has the same numbers."""
    asked = {"prompt": "a caf\u00e9", "max_tokens": 1, "temperature": 0}
    answer = await whole(client, "/completions", {**asked, "prompt_logprobs": 0})
    positions = answer["choices"][0]["prompt_logprobs"]
    chunks = await stream(client, "/completions", {**asked, "echo": True, "logprobs": 0})
    echoed = joined(chunks)["choices"][0]["logprobs"]["token_logprobs"]
    assert [None if p is None else next(iter(p.values()))["logprob"] for p in positions] == echoed[:-1]


async def test_the_script_is_what_was_written(client: httpx.AsyncClient) -> None:
    hi = [{"role": "user", "content": "hi"}]
    answer = await whole(client, "/chat/completions", {"messages": hi, "tools": TOOLS, "temperature": 0})
    choice = as_joined(answer)["choices"][0]
    assert choice["reasoning"].strip() == "Hm é."
    assert choice["content"].strip() == "Let me see."
    assert [(name, json.loads(text)) for name, text in choice["calls"]] == [("f", {"a": "x y"}), ("g", {})]
    assert choice["finish_reason"] == "tool_calls"
    text = await whole(client, "/completions", {"prompt": "go!", "temperature": 0})
    assert text["choices"][0]["text"] == 'Café is one, tea is two. {"k": 1}'
    seeded = {"prompt": "go", "temperature": 1.0, "max_tokens": 40}
    answers = [await whole(client, "/completions", {**seeded, "seed": seed}) for seed in range(4)]
    texts = {answer["choices"][0]["text"] for answer in answers}
    assert len(texts) > 1, "sampling never leaves the script"
