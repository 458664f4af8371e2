"""Reported faults of other servers, over HTTP, with the default model's vocabulary and answers by script."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_model import chain, write_scripted_model

from mlx_paged_attention.api.async_llm import AsyncLLM
from mlx_paged_attention.models.default_model import fetch_default_model
from mlx_paged_attention.models.gguf_header import read_gguf_header
from mlx_paged_attention.sampling.params import SamplingParams
from mlx_paged_attention.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

END = 2
EMOJI, OTHER_EMOJI = [10813, 242, 218], [10813, 235, 229]
WORD = [143, 233, 5415, 82, 1025, 91, 2756]  # Czech, eight letters

Scripts = list[list[int]]
Start = Callable[..., AsyncLLM]
Serve = Callable[..., AbstractContextManager[str]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(read_gguf_header(fetch_default_model()).metadata)


@pytest.fixture(scope="module")
def start(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """An engine that answers a prompt which ends with the digit ``i`` by script ``i``, and any other by 0."""
    with ExitStack() as running:

        def engine(scripts: Scripts, template: str | None = None) -> AsyncLLM:
            follow: dict[int | None, list[int]] = {}
            for index, script in enumerate(scripts):
                begins = tokenizer.encode(str(index))[-1] if index else None
                for before, after in chain(begins, *script, END).items():
                    follow.setdefault(before, []).extend(after)
            path: Path = tmp_path_factory.mktemp("scripted")
            write_scripted_model(path, follow, vocab_size=tokenizer.vocab_size, eos_token_id=END)
            tokenizer._backend.save(str(path / "tokenizer.json"))
            assert tokenizer.chat_template is not None
            own = tokenizer.chat_template.sources["default"]
            config = {"eos_token": "<|im_end|>", "chat_template": template or own}
            (path / "tokenizer_config.json").write_text(json.dumps(config))
            llm = AsyncLLM(str(path), num_blocks=64, max_num_seqs=8, max_model_len=256)
            running.callback(llm.close)
            return llm

        yield engine


def ask(url: str, script: int = 0, *, chat: bool = True, **body: Any) -> tuple[dict[str, Any], list[str]]:
    """A script's answer: the choice sent whole, and the deltas of a stream, which must join to it."""
    said = "Go on" if not script else f"Go on {script}"
    if chat:
        path = "/v1/chat/completions"
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": said}]
        body |= {"messages": messages, "continue_final_message": True}
    else:
        path = "/v1/completions"
        body |= {"prompt": said}
    body = {"temperature": 0, "max_tokens": 30, **body}
    response = httpx.post(url + path, json=body, timeout=30)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    streamed = httpx.post(url + path, json={**body, "stream": True}, timeout=30).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in streamed if event.startswith("data: {")]
    parts = [part for chunk in chunks for part in chunk["choices"]]
    deltas = [part["delta"].get("content", "") if chat else part["text"] for part in parts]
    assert "".join(deltas) == (choice["message"]["content"] if chat else choice["text"])
    assert parts[-1]["finish_reason"] == choice["finish_reason"]
    assert all(part["finish_reason"] is None for part in parts[:-1])
    return choice, deltas


@pytest.fixture(scope="module")
def texts(start: Start, tokenizer: Tokenizer) -> AsyncLLM:
    fox, greek = (tokenizer.encode(text) for text in ("The quick brown fox jumps", "alpha beta gamma delta"))
    return start([fox, greek, WORD, EMOJI])


@pytest.fixture
def url(texts: AsyncLLM, serve: Serve) -> Iterator[str]:
    with serve(texts) as url:
        yield url


def test_the_first_half_of_a_stop_string_is_never_sent(url: str) -> None:
    """SharpAI/SwiftLM#126"""
    choice, deltas = ask(url, stop=["own f"])
    assert "".join(deltas) == "The quick br"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "own f")


@pytest.mark.parametrize("stop", [["gamma", "beta"], ["beta", "gamma"]])
def test_of_two_stop_strings_the_earlier_one_ends(url: str, stop: list[str]) -> None:
    """ollama/ollama#4797"""
    for chat in (True, False):
        _, deltas = ask(url, 1, chat=chat, stop=stop)
        assert "".join(deltas) == "alpha "


def test_empty_stop_strings_are_refused_and_no_stop_strings_are_none(url: str) -> None:
    """EuroEval/EuroEval#560"""
    hi = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 9}
    for stop in ("", [""], ["a", ""]):
        response = httpx.post(f"{url}/v1/chat/completions", json={**hi, "stop": stop})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "stop"
    for stop in ([], ["1", "2", "3", "4", "5"]):
        assert "".join(ask(url, stop=stop)[1]) == "The quick brown fox jumps"


def test_characters_of_several_tokens_arrive_whole(url: str) -> None:
    """waybarrios/vllm-mlx#109"""
    choice, deltas = ask(url, 2)
    assert choice["message"]["content"] == "ďábelské"
    assert not any("\ufffd" in delta for delta in deltas)


def test_tokens_that_are_a_part_of_a_character_have_their_bytes(url: str) -> None:
    """abetlen/llama-cpp-python#1787"""
    choice, _ = ask(url, 3, logprobs=True, top_logprobs=3, max_tokens=3)
    content = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[240, 159], [152], [128]]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"]
    for entry in content:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)


def test_a_cut_answer_says_so(url: str) -> None:
    """mudler/LocalAI#3533"""
    choice, _ = ask(url, max_tokens=3, ignore_eos=True)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "The quick brown")


def test_stops_need_no_token_borders_and_stop_tokens_are_told(
    start: Start, serve: Serve, tokenizer: Tokenizer
) -> None:
    """vllm-project/vllm#3672"""
    with serve(start([tokenizer.encode("The capital of"), [10813, 16438]])) as url:
        choice, _ = ask(url, stop=["apit"])
        assert choice["message"]["content"] == "The c"
        for chat in (True, False):
            choice, deltas = ask(url, chat=chat, stop_token_ids=[282])
            assert "".join(deltas) == "The capital"
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 282)
        # Blaizzy/mlx-vlm#1705: invalid bytes, then a token that begins with a space.
        for chat in (True, False):
            assert "".join(ask(url, 1, chat=chat)[1]) == "\ufffd fox"


def test_streams_at_once_each_get_their_own_character(start: Start, serve: Serve) -> None:
    """exo-explore/exo#1691"""
    # Both begin with the same token; the likelier second one is held down for every other stream.
    with serve(start([EMOJI, OTHER_EMOJI])) as url, ThreadPoolExecutor(8) as pool:

        def answer(number: int) -> str:
            script = number % 2
            choice, deltas = ask(url, script, logit_bias={"242": -4} if script else {})
            assert not any("\ufffd" in delta for delta in deltas)
            return choice["message"]["content"]

        assert list(pool.map(answer, range(24))) == ["😀", "👋"] * 12


async def test_tool_calls_in_a_history_are_read_alike_with_and_without_a_form(
    start: Start, serve: Serve
) -> None:
    """raullenchai/Rapid-MLX#981, ml-explore/mlx-lm#1065"""
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "exec", "arguments": '{"command":"ls"}'}},
        {"id": "call_2", "type": "function", "function": {"name": "exec", "arguments": ""}},
    ]
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "README"},
    ]
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{% for name, value in call.function.arguments | items %}{{ name }}={{ value }};{% endfor %}"
        "{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}{% endfor %}"
    )
    llm = start([EMOJI], template)
    schema = {"enum": [{"a": 1}]}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    asked: dict[str, Any] = {"messages": history, "max_tokens": 40, "temperature": 0}
    async for output in llm.chat(history, SamplingParams(max_tokens=1)):
        ids = output.prompt_token_ids
    with serve(llm) as url:
        async with httpx.AsyncClient(base_url=f"{url}/v1/chat", timeout=60) as client:
            for body in (asked, {**asked, "response_format": form}):
                rendered = (await client.post("/completions/render", json=body)).json()
                assert rendered["token_ids"] == ids
                assert 'command=ls;exec {"command":"ls"}exec {}<tool>README' in rendered["prompt"]
                for stream in (False, True):
                    response = await client.post("/completions", json={**body, "stream": stream})
                    assert response.status_code == 200
            answer = await client.post("/completions", json={**asked, "response_format": form})
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"a": 1}
