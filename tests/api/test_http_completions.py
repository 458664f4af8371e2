"""``/v1/completions`` over HTTP, on a scripted engine."""

import json
from typing import Any

import httpx
import pytest
from fake_llm import ANSWER, MAX_MODEL_LEN, FakeLLM

URL = "/v1/completions"
FIRST = "0" + ANSWER[1:]


async def post(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def events(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await client.post(URL, json={"stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_cut_answer_says_length_and_usage_adds_up(client: httpx.AsyncClient) -> None:
    answer = await post(client, prompt="hello", max_tokens=5)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake/bytes"
    (choice,) = answer["choices"]
    assert choice["text"] == FIRST[:5]
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_sixteen_tokens_are_generated_unless_asked_otherwise(client: httpx.AsyncClient) -> None:
    assert (await post(client, prompt="hello"))["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "choices", "tokens"),
    [("ab", 1, 2), ([97, 98], 1, 2), (["ab", "cde"], 2, 5), ([[97], [98, 99]], 2, 3)],
)
async def test_a_prompt_is_text_or_token_ids_or_a_list_of_either(
    client: httpx.AsyncClient, prompt: Any, choices: int, tokens: int
) -> None:
    answer = await post(client, prompt=prompt, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(choices))
    assert answer["usage"]["prompt_tokens"] == tokens
    assert answer["usage"]["completion_tokens"] == 2 * choices


async def test_choices_of_several_prompts_are_prompt_major(client: httpx.AsyncClient) -> None:
    """openai/openai-python#90"""
    answer = await post(
        client, prompt=["example 1", "example 2"], n=2, max_tokens=4, temperature=0, echo=True
    )
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "example 1" + "0he "),
        (1, "example 1" + "1he "),
        (2, "example 2" + "0he "),
        (3, "example 2" + "1he "),
    ]
    assert answer["usage"]["prompt_tokens"] == 18
    assert answer["usage"]["completion_tokens"] == 16


async def test_a_stream_joins_to_the_whole_answer(client: httpx.AsyncClient) -> None:
    whole = await post(client, prompt="x", max_tokens=100, logprobs=2)
    chunks = await events(client, prompt="x", max_tokens=100, logprobs=2)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"] == FIRST
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    for name, values in whole["choices"][0]["logprobs"].items():
        assert [value for choice in choices for value in choice["logprobs"][name]] == values
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_streamed_choices_are_tagged_and_each_ends_once(client: httpx.AsyncClient) -> None:
    chunks = await events(client, prompt="x", max_tokens=7, n=3)
    by_index: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        by_index[choice["index"]].append(choice)
    for index, choices in by_index.items():
        assert "".join(choice["text"] for choice in choices) == f"{index}he qui"
        assert [choice["finish_reason"] for choice in choices] == [None] * 6 + ["length"]


async def test_usage_comes_in_a_last_chunk_of_its_own(client: httpx.AsyncClient) -> None:
    chunks = await events(client, prompt="x", max_tokens=3, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 3
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 4


async def test_continuous_usage_is_in_every_chunk_and_never_falls(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await events(client, prompt="x", max_tokens=3, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


async def test_cached_tokens_are_told_in_both_modes(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    """jundot/omlx#919"""
    llm._cached = lambda ids: 16 * ((len(ids) - 1) // 16)
    whole = await post(client, prompt="x" * 70, max_tokens=2)
    chunks = await events(client, prompt="x" * 70, max_tokens=2, stream_options={"include_usage": True})
    assert whole["usage"] == chunks[-1]["usage"]
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}


async def test_no_logprobs_unless_asked_and_zero_tells_the_token_itself(client: httpx.AsyncClient) -> None:
    answer = await post(client, prompt="x", max_tokens=3, logprobs=0)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["0", "h", "e"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"] == [{"0": -0.5}, {"h": -0.5}, {"e": -0.5}]
    assert logprobs["text_offset"] == [0, 1, 2]


async def test_logprobs_list_the_alternatives_and_the_token(client: httpx.AsyncClient) -> None:
    answer = await post(client, prompt="x", max_tokens=1, logprobs=1)
    # The scripted token is the second most likely, so that it comes on top of the one alternative.
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"1": -0.5, "0": -1.0}]


async def test_echo_scores_the_prompt(client: httpx.AsyncClient) -> None:
    """ggml-org/llama.cpp#27174"""
    answer = await post(client, prompt="abc", echo=True, logprobs=1, max_tokens=1, temperature=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "abc0"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "0"]
    assert logprobs["token_logprobs"] == [None, -1.0, -1.0, -1.0]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 1, 2, 3]


async def test_echo_with_no_tokens_scores_the_prompt_alone(client: httpx.AsyncClient) -> None:
    answer = await post(client, prompt=[97, 98, 99], echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "abc"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert answer["usage"]["completion_tokens"] == 0


async def test_a_streamed_echo_begins_with_the_prompt(client: httpx.AsyncClient) -> None:
    chunks = await events(client, prompt="abc", echo=True, logprobs=0, max_tokens=2)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["abc0", "h"]
    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[0, 1, 2, 3], [4]]


@pytest.mark.parametrize(("asked", "entries"), [(None, "absent"), (0, 1), (2, 3)])
async def test_prompt_logprobs_begin_with_null(client: httpx.AsyncClient, asked: Any, entries: Any) -> None:
    (choice,) = (await post(client, prompt="abc", prompt_logprobs=asked, max_tokens=2))["choices"]
    if entries == "absent":
        assert "prompt_logprobs" not in choice
        return
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [len(position) for position in others] == [entries, entries]
    assert set(others[0][str(ord("b"))]) == {"logprob", "rank", "decoded_token"}


async def test_best_of_returns_n_answers(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    answer = await post(client, prompt="x", n=2, best_of=4, max_tokens=4)
    assert [choice["text"] for choice in answer["choices"]] == ["0he ", "1he "]
    assert llm.params[0].best_of == 4


async def test_every_sampling_field_reaches_the_engine(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    sent: dict[str, Any] = {
        "n": 2,
        "best_of": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 42,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "thinking_token_budget": 5,
        "logprobs": 1,
        "prompt_logprobs": 1,
        "logit_bias": {"5": 1.5},
        "allowed_token_ids": [1, 2],
        "bad_words": ["no"],
        "priority": 3,
        "cache_salt": "salt",
    }
    await post(client, prompt="x", **sent)
    (params,) = llm.params
    for name, value in sent.items():
        expected = {5: 1.5} if name == "logit_bias" else value
        assert getattr(params, name) == expected, name


async def test_the_models_own_defaults_hold_unless_the_request_says_otherwise() -> None:
    llm = FakeLLM(generation_config={"temperature": 0.6, "top_k": 20, "max_new_tokens": 4, "top_p": None})
    from mlx_paged_attention.api.server.app import create_app

    transport = httpx.ASGITransport(create_app(llm))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        await post(client, prompt="x")
        await post(client, prompt="x", temperature=0, max_tokens=2, top_k=None)
    given, overridden = llm.params
    assert (given.temperature, given.top_k, given.top_p, given.max_tokens) == (0.6, 20, 1.0, 4)
    assert (overridden.temperature, overridden.top_k, overridden.max_tokens) == (0.0, 20, 2)


async def test_fields_that_say_nothing_about_the_answer_are_accepted(client: httpx.AsyncClient) -> None:
    await post(client, prompt="x", user="me", metadata={"a": "b"}, suffix=None, store=False, max_tokens=1)


BAD = [
    ({"temperature": 999999}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_p": 2}, "min_p"),
    ({"top_k": -5}, "top_k"),
    ({"n": 1000000}, "n"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"best_of": 1000000}, "best_of"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"unknown": True}}, "stream_options"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"logit_bias": {"256": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"suffix": "end"}, "suffix"),
    ({"response_format": {"type": "json"}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"structured_outputs": {"regex": "a"}, "temperature": 0, "use_beam_search": True}, "structured_outputs"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "start: 'a'", "response_format": {"type": "json_object"}}, "guided_grammar"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"use_beam_search": True, "stream": True}, "use_beam_search"),
    ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
    ({"use_beam_search": True, "logprobs": 1}, "logprobs"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
    ({"store": 0}, "store"),
    ({"temprature": 1}, "temprature"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [97, 99999999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"user": "\ud800"}, "user"),
    ({"stop": "\ud800"}, "stop"),
    ({"prompt": ["x"] * 64, "n": 128}, "prompt"),
]


@pytest.mark.parametrize(("change", "param"), BAD, ids=[json.dumps(change)[:60] for change, _ in BAD])
async def test_a_bad_value_is_refused_by_name_and_the_next_request_answered(
    client: httpx.AsyncClient, change: dict[str, Any], param: str
) -> None:
    """ggml-org/llama.cpp#19367, vllm-project/vllm#30895, waybarrios/vllm-mlx#340"""
    content = json.dumps({"prompt": "x", "max_tokens": 4} | change)  # escapes what UTF-8 cannot carry
    response = await client.post(URL, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert error["type"] == "invalid_request_error"
    assert (await post(client, prompt="x", max_tokens=1))["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("value", ["soon", "", 1, [], "Never"])
async def test_a_misspelt_early_stopping_is_told_its_values(client: httpx.AsyncClient, value: Any) -> None:
    body = {"prompt": "x", "use_beam_search": True, "temperature": 0, "early_stopping": value}
    response = await client.post(URL, json=body)
    assert response.status_code == 400
    assert "true, false or 'never'" in response.json()["error"]["message"]


async def test_a_field_whose_name_is_no_unicode_is_refused(client: httpx.AsyncClient) -> None:
    content = '{"prompt": "x", "\\ud800": 1}'
    response = await client.post(URL, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "max_tokens", "seed", "logit_bias"])
async def test_numbers_that_json_cannot_carry_are_refused_by_name(
    client: httpx.AsyncClient, field: str, literal: str
) -> None:
    value = f'{{"5": {literal}}}' if field == "logit_bias" else literal
    response = await client.post(
        URL, content=f'{{"prompt": "x", "{field}": {value}}}', headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


async def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers(client: httpx.AsyncClient) -> None:
    for stream in (False, True):
        response = await client.post(URL, json={"prompt": "x" * 300, "stream": stream})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "300" in error["message"]
        assert str(MAX_MODEL_LEN - 1) in error["message"]


async def test_one_bad_prompt_of_several_ends_the_others(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.step_time = 0.01
    response = await client.post(URL, json={"prompt": [[97], [9999], [98]], "max_tokens": 50})
    assert response.status_code == 400
    assert llm.active == set()


async def test_without_a_tokenizer_token_ids_work_and_text_and_echo_are_refused() -> None:
    from mlx_paged_attention.api.server.app import create_app

    transport = httpx.ASGITransport(create_app(FakeLLM(tokenizer=False)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        assert (await post(client, prompt=[1, 2], max_tokens=3))["usage"]["completion_tokens"] == 3
        for body in ({"prompt": "text"}, {"prompt": [1], "echo": True}):
            assert (await client.post(URL, json=body)).status_code == 400
