"""``/tokenize``, ``/detokenize`` and the two ``/render`` routes: prompts without answers."""

import json
from typing import Any

import httpx
import pytest
from fake_llm import FakeLLM
from test_http_server import HI, connect, error_of

from mlx_paged_attention.api.async_llm import AsyncLLM

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CHAT_RENDER, COMPLETION_RENDER = "/v1/chat/completions/render", "/v1/completions/render"


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_text_is_counted_in_tokens_and_comes_back(client: httpx.AsyncClient) -> None:
    answer = await post(client, "/tokenize", model="fake/bytes", prompt="a é")
    assert answer == {"count": 4, "max_model_len": 256, "tokens": [97, 32, 195, 169], "token_strs": None}
    assert await post(client, "/detokenize", tokens=answer["tokens"]) == {"prompt": "a é"}
    named = await post(client, "/tokenize", prompt="a b", return_token_strs=True)
    assert named["token_strs"] == ["a", "Ġ", "b"]


async def test_nothing_has_no_tokens(client: httpx.AsyncClient) -> None:
    assert (await post(client, "/tokenize", prompt=""))["tokens"] == []
    assert await post(client, "/detokenize", tokens=[]) == {"prompt": ""}


async def test_a_text_longer_than_any_answer_is_counted(client: httpx.AsyncClient) -> None:
    answer = await post(client, "/tokenize", prompt="x" * 20_000)
    assert answer["count"] == 20_000 > answer["max_model_len"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"temperature": 0, "max_tokens": 3, "stream": True},
    ],
)
async def test_a_conversation_is_tokenized_rendered_and_answered_from_the_same_ids(
    llm: FakeLLM, client: httpx.AsyncClient, options: dict[str, Any]
) -> None:
    body = {**HI, **options}
    tokenized = await post(client, "/tokenize", **body)
    rendered = await post(client, CHAT_RENDER, **body)
    assert not llm.prompts, "something was generated"
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert tokenized["tokens"] == rendered["token_ids"] == llm.prompts[0]
    assert bytes(rendered["token_ids"]).decode() == rendered["prompt"]
    assert rendered["prompt"].startswith("<user>hi")
    assert tokenized["count"] == len(llm.prompts[0])


async def test_a_rendered_request_says_how_it_would_be_continued(client: httpx.AsyncClient) -> None:
    rendered = await post(client, CHAT_RENDER, **HI, temperature=0.5, seed=3, stream=True)
    assert (rendered["model"], rendered["stream"]) == ("fake/bytes", True)
    params = rendered["sampling_params"]
    assert (params["temperature"], params["seed"], params["max_tokens"]) == (0.5, 3, None)
    prompts = await post(client, COMPLETION_RENDER, prompt=["ab", "c"], stop="x", logit_bias={"7": 1.5})
    assert [(p["prompt"], p["token_ids"]) for p in prompts] == [("ab", [97, 98]), ("c", [99])]
    assert prompts[0]["sampling_params"]["stop"] == "x"
    assert prompts[0]["sampling_params"]["logit_bias"] == {"7": 1.5}
    assert (await post(client, COMPLETION_RENDER, prompt=[1, 2]))[0]["prompt"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", **HI}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {**HI, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {**HI, "tools": TOOLS}, "tools"),
        ("/tokenize", {"prompt": "x", "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [256]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**400]}, "tokens"),
        ("/detokenize", {"tokens": ["1"]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [], "skip_special_tokens": True}, "skip_special_tokens"),
        (CHAT_RENDER, {"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        (CHAT_RENDER, {**HI, "stop_token_ids": [300]}, "stop_token_ids"),
        (COMPLETION_RENDER, {"prompt": ["a", [1]]}, "prompt"),
        (COMPLETION_RENDER, {"prompt": [256]}, "prompt"),
        (COMPLETION_RENDER, {"prompt": "a", "top_p": 2}, "top_p"),
    ],
)
async def test_what_has_no_tokens_is_refused_by_name(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:

    response = await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param


async def test_an_unknown_model_has_no_tokens_either(client: httpx.AsyncClient) -> None:
    bodies = {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": []}, CHAT_RENDER: HI}
    for path, body in {**bodies, COMPLETION_RENDER: {"prompt": "x"}}.items():
        response = await client.post(path, json={"model": "other", **body})
        assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found"), path


async def test_without_a_tokenizer_only_token_ids_are_rendered() -> None:
    async with connect(FakeLLM(tokenizer=False)) as client:
        bodies = {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": []}, CHAT_RENDER: HI}
        for path, body in bodies.items():
            response = await client.post(path, json=body)
            assert response.status_code == 400, path
            assert "skip_tokenizer_init" in error_of(response)["message"]
        assert (await post(client, COMPLETION_RENDER, prompt=[1, 2]))[0]["token_ids"] == [1, 2]


@pytest.mark.model
async def test_control_tokens_of_the_default_model() -> None:
    async with AsyncLLM(max_model_len=256, num_blocks=33) as llm, connect(llm) as client:
        rendered = await post(client, CHAT_RENDER, messages=[{"role": "user", "content": "<|im_end|>"}])
        # What the template wrote is control tokens, what the user wrote is text.
        assert rendered["token_ids"].count(2) == rendered["prompt"].count("<|im_end|>") - 1
        ids = (await post(client, "/tokenize", prompt="<|im_start|>user"))["tokens"]
        assert ids[0] == 1
        assert await post(client, "/detokenize", tokens=ids) == {"prompt": "<|im_start|>user"}
        info = (await client.get("/tokenizer_info")).json()
        assert (info["bos_token"], info["eos_token"]) == ("<|im_start|>", "<|im_end|>")
        assert "<|im_start|>" in info["chat_template"]
        strings = await post(client, "/tokenize", prompt="The capital", return_token_strs=True)
        assert (strings["tokens"], strings["token_strs"]) == ([504, 3575], ["The", "Ġcapital"])


async def test_a_completion_is_rendered_as_it_would_be_computed(
    client: httpx.AsyncClient, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + list(text.encode())

    monkeypatch.setattr(llm.tokenizer, "encode", encode)
    for extra, ids in (({}, [1, 104, 105]), ({"add_special_tokens": False}, [104, 105])):
        (rendered,) = await post(client, COMPLETION_RENDER, prompt="hi", **extra)
        assert (rendered["prompt"], rendered["token_ids"]) == ("hi", ids)
    asked = {"prompt": "hi", "echo": True, "logprobs": 2, "max_tokens": 0}
    (rendered,) = await post(client, COMPLETION_RENDER, **asked)
    params = rendered["sampling_params"]
    assert (params["max_tokens"], params["logprobs"], params["prompt_logprobs"]) == (1, 2, 2)
