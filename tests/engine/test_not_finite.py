"""Logits that are no numbers end their own request, and leave nothing behind."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from engine_hooks import check_books, engine_of, settled_stats, start_together, submit
from fake_runner import expected_output
from oracle import assert_matches, greedy, varied_prompt
from scripted_engine import ScriptedEngine, letters

from mlx_paged_attention import LLM, SamplingParams
from mlx_paged_attention.errors import RequestFailedError

MARK = 77  # the token whose embedding is poisoned


class Poisoned(nn.Module):
    """An embedding in which one token is NaN, or too large for what follows."""

    def __init__(self, part, value):
        super().__init__()
        self.part = part
        self._value = value

    def __call__(self, ids):
        return mx.where((ids == MARK)[..., None], self._value, self.part(ids))

    def as_linear(self, x):
        return self.part.as_linear(x)


@pytest.fixture
def llm(tiny_model):
    options = {"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    with LLM(model=str(tiny_model("llama")), skip_tokenizer_init=True, **options) as llm:
        yield llm


def clean(length, seed):
    return [token if token != MARK else 5 for token in varied_prompt(length, seed)]


@pytest.mark.parametrize("where", [3, 40])  # seen by the chunk that samples, or by one before it
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=6),
        SamplingParams(temperature=1.0, max_tokens=6, seed=1),
        SamplingParams(temperature=1.0, top_p=0.9, max_tokens=6, logprobs=2, seed=1),
        SamplingParams(temperature=1.0, top_k=5, max_tokens=6, seed=1),
        SamplingParams(temperature=0, presence_penalty=1.0, max_tokens=6, allowed_token_ids=[1, 2]),
    ],
)
def test_nan_ends_one_request_and_no_neighbour(llm, oracle, where, params):
    model = engine_of(llm)._runner._host.model.model
    model.embed_tokens = Poisoned(model.embed_tokens, float("nan"))
    bad = clean(60, 1)
    bad[where] = MARK
    good = [clean(9, 2), clean(33, 3)]
    start_together(llm, 3)
    waits = [submit(llm, good[0], greedy(12)), submit(llm, bad, params), submit(llm, good[1], greedy(12))]
    with pytest.raises(RequestFailedError, match=r"not finite.*dtype"):
        waits[1]()
    for wait, prompt in zip(waits[::2], good, strict=True):
        assert_matches(wait().outputs[0], oracle("llama").greedy(prompt, 12))
    check_books(llm)
    assert settled_stats(llm).used_blocks == 0
    # Its blocks are not found by whoever begins alike.
    model.embed_tokens = model.embed_tokens.part
    (output,) = llm.generate([bad], greedy(6))
    assert output.num_cached_tokens == 0
    assert_matches(output.outputs[0], oracle("llama").greedy(bad, 6))


def test_failures_of_many_requests_do_not_end_the_engine(llm, oracle):
    model = engine_of(llm)._runner._host.model.model
    model.embed_tokens = Poisoned(model.embed_tokens, float("nan"))
    for seed in range(6):
        with pytest.raises(RequestFailedError, match="not finite"):
            llm.generate([[*clean(5, seed), MARK]], greedy(4))
    (output,) = llm.generate([clean(7, 1)], greedy(4))
    assert_matches(output.outputs[0], oracle("llama").greedy(clean(7, 1), 4))


@pytest.mark.parametrize("ahead", [False, True])
def test_all_answers_of_a_request_end_with_the_one_that_failed(ahead):
    engine = ScriptedEngine()
    engine.runner.runs_ahead = ahead
    engine.runner.fails_rows = {"a#1": 2}  # its third token
    engine.add("a", [1, 2, 3], n=3, max_tokens=9)
    engine.add("b", [1, 2, 4], max_tokens=9)
    engine.run()
    error = engine.error("a")
    assert isinstance(error, RequestFailedError)
    assert str(error) == "request a failed: planted"
    assert engine.last("b").outputs[0].token_ids == expected_output([1, 2, 4], 9)


def test_an_answer_whose_text_cannot_be_made_ends_alone(monkeypatch):
    engine = ScriptedEngine(tokenizer=letters())
    engine.add("a", "abc", answer="xyz....")
    engine.add("b", "abd", answer="usual.")
    detokenizer = engine.engine._live.of("a")[1]._detokenizer

    def broken(token_id):
        raise ValueError("no such byte")

    monkeypatch.setattr(detokenizer, "push", broken)
    engine.step()
    error = engine.error("a")
    assert isinstance(error, RequestFailedError)
    assert "no such byte" in str(error)
    assert isinstance(error.__cause__, ValueError)
    engine.engine.abort("b")
    engine.check_idle()
