"""One tiny model on the engine, compared with mlx-lm alone, feature by feature.

A feature is a way of getting to a token that could lose a position, a key or a state. Each one
shuffles the free blocks and fills them with NaN first, so that a block read by mistake shows.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine_hooks import (
    check_books,
    poison_free_blocks,
    preempt_everything,
    recorded_plans,
    settled_stats,
    shuffle_free_blocks,
    token_budget,
    wrapped_launch,
)
from oracle import LOGPROB_TOLERANCE, Oracle, assert_matches, greedy, varied_prompt

from mlx_paged_attention import LLM

BLOCK_SIZE = 8
OUTPUTS = 6
RAGGED = [varied_prompt(length, seed) for seed, length in enumerate((33, 1, 16, 50, 5, 17))]
# One below, at and above the windows of 8 and 16 and the blocks of 8; decoding crosses the next border.
EDGES = [varied_prompt(length, 10 + length) for length in (6, 7, 8, 9, 15, 16, 17, 24)]
# Shorter than the convolutions of recurrent layers, and than chunks.
SHORT = [varied_prompt(length, 20 + length) for length in (1, 2, 3, 4, 5)]
LONG = varied_prompt(60, 7)
# Around and beyond thresholds of ``FAR`` tokens, which no prompt of the engine's check at load reaches.
FAR = 64
BEYOND = [varied_prompt(length, length) for length in (60, 75, 3, 100, 63, 64, 65)]
OPTIONS = {
    "block_size": BLOCK_SIZE,
    "num_blocks": 96,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 160,
    "max_model_len": 128,
}


class ParityCase:
    """A tiny model loaded twice: by the engine, and by mlx-lm alone.

    Args:
        options: in place of ``OPTIONS``.

    Raises:
        UnsupportedModelError: the engine refuses the model; nothing is left running.
    """

    def __init__(self, directory: Path, **options: Any) -> None:
        self.llm = LLM(model=str(directory), skip_tokenizer_init=True, **{**OPTIONS, **options})
        self.oracle = Oracle.load(directory)
        self._salts = itertools.count()

    def close(self) -> None:
        self.llm.close()

    def compare(
        self, prompts: list[list[int]], num_tokens: int | list[int] = OUTPUTS, **params: Any
    ) -> list[Any]:
        """Run ``prompts`` together; every answer must be the reference's.

        Args:
            num_tokens: of all answers, or one number for each prompt's.
            params: of all requests.
        """
        params.setdefault("cache_salt", self.new_salt())
        counts = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else num_tokens
        requests = [greedy(count, **params) for count in counts]
        outputs = self.llm.generate(prompts, requests, use_tqdm=False)
        for output, prompt, count in zip(outputs, prompts, counts, strict=True):
            reference = self.oracle.greedy(prompt, count)
            for answer in output.outputs:
                try:
                    assert_matches(answer, reference)
                except AssertionError as error:
                    cached = (
                        f", {output.num_cached_tokens} of them cached" if output.num_cached_tokens else ""
                    )
                    raise AssertionError(f"prompt of {len(prompt)} tokens{cached}: {error}") from None
        return outputs

    def new_salt(self) -> str:
        """Keeps a feature's prefixes to itself."""
        return str(next(self._salts))


def ragged_batch(case: ParityCase) -> None:
    """Prompts of different lengths, whole, beside each other and beside decoding rows."""
    case.compare(RAGGED)


def chunked_prefill(case: ParityCase) -> None:
    """Prompts in chunks of at most 7 tokens, which begin and end anywhere in blocks and windows."""
    with token_budget(case.llm, 7), recorded_plans(case.llm) as plans:
        case.compare(RAGGED)
    assert all(sum(len(row.token_ids) for row in plan.rows) <= 7 for plan in plans)


def requests_that_come_and_go(case: ParityCase) -> None:
    """More requests than run at once, which end at different times: others take their places."""
    prompts = [*RAGGED, *SHORT]
    assert len(prompts) > OPTIONS["max_num_seqs"]
    with token_budget(case.llm, 20):
        case.compare(prompts, num_tokens=[3 + 5 * i % 7 for i in range(len(prompts))])


def prefix_hit(case: ParityCase) -> None:
    """The same prompt again, a longer one with the same beginning, and a conversation."""
    salt = case.new_salt()
    answers = case.compare([LONG[:40]], cache_salt=salt)[0].outputs[0].token_ids
    (again,) = case.compare([LONG[:40]], cache_salt=salt)
    (longer,) = case.compare([LONG], cache_salt=salt)
    (turn,) = case.compare([LONG[:40] + answers + LONG[40:49]], cache_salt=salt)
    cached = [output.num_cached_tokens for output in (again, longer, turn)]
    assert min(cached) > 0, f"nothing was hit: {cached} tokens"


def preemption(case: ParityCase) -> None:
    """All blocks taken from all requests, while they compute their prompts and while they decode."""
    before = settled_stats(case.llm).preemptions
    for steps_before in (2, 6):
        steps = itertools.count(1)

        def preempt(_plan: Any, steps: Iterator[int] = steps, at: int = steps_before) -> None:
            if next(steps) == at:
                preempt_everything(case.llm)

        with token_budget(case.llm, 48), wrapped_launch(case.llm, preempt):
            case.compare(RAGGED)
    assert settled_stats(case.llm).preemptions > before, "nothing was preempted"


def fork(case: ParityCase) -> None:
    """Two answers to one prompt, and the same prompt twice, beside others."""
    case.compare([LONG[:21], RAGGED[4]], n=2)
    case.compare([LONG[:21], RAGGED[0], LONG[:21]])


def long_chunks(case: ParityCase) -> None:
    """Chunks of more tokens than share a forward with others: at the start, later, and after a hit."""
    with token_budget(case.llm, 60), recorded_plans(case.llm) as plans:
        case.compare([*RAGGED[:3], BEYOND[3]])
    assert any(row.start > 0 and len(row.token_ids) > 32 for plan in plans for row in plan.rows)
    salt = case.new_salt()
    case.compare([LONG[:20]], cache_salt=salt)
    case.compare([LONG], cache_salt=salt)


def prompt_logprobs(case: ParityCase) -> None:
    """The log-probabilities of a prompt's own tokens, computed in chunks beside other requests."""
    prompts = [RAGGED[0], RAGGED[5]]
    with token_budget(case.llm, 15):
        outputs = case.compare(prompts, prompt_logprobs=3)
    for output, prompt in zip(outputs, prompts, strict=True):
        expected = case.oracle.prompt_logprobs(prompt)
        for position, entries in enumerate(output.prompt_logprobs[1:]):
            for token, entry in entries.items():
                delta = abs(entry.logprob - float(expected[position, token]))
                assert delta <= LOGPROB_TOLERANCE, f"after prompt position {position}: off by {delta:.2e}"


def window_edges(case: ParityCase) -> None:
    """Prompts that end one before, at and after the border of a window or a block."""
    case.compare(EDGES, num_tokens=10)


FEATURES = (
    ragged_batch,
    chunked_prefill,
    long_chunks,
    requests_that_come_and_go,
    prefix_hit,
    preemption,
    fork,
    window_edges,
    prompt_logprobs,
)


def beyond_the_check_at_load(case: ParityCase) -> None:
    """What changes after ``FAR`` tokens (see ``with_far_thresholds``): whole, in chunks, after a hit."""
    case.compare(BEYOND, num_tokens=8)
    with token_budget(case.llm, 9):
        case.compare(BEYOND, num_tokens=8)
    salt = case.new_salt()
    case.compare([BEYOND[3][:80]], cache_salt=salt)
    case.compare([BEYOND[3]], cache_salt=salt)


_THRESHOLDS = (
    "attention_chunk_size",
    "attention_window_size",
    "floor_scale",
    "index_topk",
    "loop_window_size",
    "original_max_position_embeddings",
    "sliding_window",
    "sliding_window_size",
    "window_size",
)


def with_far_thresholds(config: Any) -> Any:
    """``config`` with every window, chunk and switch point moved to ``FAR`` tokens.

    Real models have them at thousands. With the engine's check at load on prompts of a few dozen
    tokens, a model whose window we do not see passes it, and is wrong later.
    """
    if isinstance(config, dict):
        return {
            key: FAR if key in _THRESHOLDS and value else with_far_thresholds(value)
            for key, value in config.items()
        }
    return config


def check(case: ParityCase, feature: Callable[[ParityCase], None]) -> None:
    """Raise AssertionError, with what differs, unless the feature is exact for this model."""
    shuffle_free_blocks(case.llm, seed=len(feature.__name__))
    poison_free_blocks(case.llm)
    feature(case)
    check_books(case.llm)
    assert settled_stats(case.llm).used_blocks == 0, "blocks were not given back"
