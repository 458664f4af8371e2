"""From what a caller hands in to what an engine request needs, with every refusal said once."""

import random

import msgspec

from mlx_paged_attention.engine.outputs import EngineInfo
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.params import RowSampling, RowThinking, SamplingParams
from mlx_paged_attention.sampling.structured_outputs import structured_outputs
from mlx_paged_attention.scheduler.request import Request
from mlx_paged_attention.text.reasoning_tokens import ReasoningTokens
from mlx_paged_attention.text.thinking import thinking_of
from mlx_paged_attention.text.tokenizer import Tokenizer


def tokenize(prompt: str | list[int], tokenizer: Tokenizer | None) -> tuple[str | None, list[int]]:
    """A prompt as (text or ``None``, token ids).

    Raises:
        InvalidRequestError: it is empty, of another type, or text without a tokenizer.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequestError(
                "the prompt is text, but the engine has no tokenizer (skip_tokenizer_init); pass token ids",
                "prompt",
            )
        token_ids = tokenizer.encode(prompt)
        text: str | None = prompt
    elif isinstance(prompt, list):
        token_ids, text = list(prompt), None  # the caller may go on to change theirs
    else:
        raise InvalidRequestError(
            f"a prompt must be a string or a list of token ids, not {type(prompt).__name__}", "prompt"
        )
    if not token_ids:
        raise InvalidRequestError("the prompt is empty: there is nothing to continue", "prompt")
    return text, token_ids


def check_token_ids(token_ids: list[int], params: SamplingParams, vocab_size: int) -> None:
    """Refuse ids that the model has no row for.

    Raises:
        InvalidRequestError: names the field, the id and the vocabulary's size.
    """
    named = {
        "prompt": token_ids,
        "stop_token_ids": params.stop_token_ids or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias or (),
    }
    for name, ids in named.items():
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InvalidRequestError(f"{name} must hold integer token ids, not {token_id!r}", name)
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"{name} has token id {token_id}; the vocabulary has ids 0 to {vocab_size - 1}", name
                )


def row_sampling(
    params: SamplingParams,
    info: EngineInfo,
    tokenizer: Tokenizer | None,
    index: int,
    seeds: random.Random,
    thinking: RowThinking | None = None,
    first: RowSampling | None = None,
) -> RowSampling:
    """What the sampler needs for answer ``index`` of a request.

    Args:
        first: of answer 0 of the same request, once that is known.

    Raises:
        InvalidRequestError: what needs a tokenizer, without one; a form that cannot be enforced.
    """
    seed = seeds.getrandbits(63) if params.seed is None else params.seed + index
    if first is not None:
        # Every answer has the same prompt: the first one scores it, the others may find it cached.
        return msgspec.structs.replace(first, seed=seed, prompt_logprobs=None)
    if tokenizer is None:
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, name):
                raise InvalidRequestError(
                    f"{name} needs a tokenizer, and the engine has none (skip_tokenizer_init)", name
                )
    logprobs = params.logprobs
    if logprobs is None and params.num_sequences > params.n:
        logprobs = 0  # best_of compares cumulative log-probabilities
    # A model's files may name ids that its logits have no column for; none of them can be sampled.
    stop_ids = [] if params.ignore_eos else [i for i in info.eos_token_ids if i < info.vocab_size]
    bad_words = tokenizer.bad_word_ids(params.bad_words) if tokenizer and params.bad_words else []
    grammar = None
    if tokenizer is not None and params.structured_outputs is not None:
        grammar = tokenizer.grammars.compile(structured_outputs(params.structured_outputs))
    return RowSampling(
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=params.top_k if 0 < params.top_k < info.vocab_size else 0,
        min_p=float(params.min_p),
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        seed=seed,
        min_tokens=params.min_tokens,
        stop_ids=[*stop_ids, *(params.stop_token_ids or ())],
        logprobs=logprobs,
        prompt_logprobs=params.prompt_logprobs,
        logit_bias={k: float(v) for k, v in (params.logit_bias or {}).items()},
        allowed_token_ids=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
        bad_words=[word for word in bad_words if max(word) < info.vocab_size],
        grammar=grammar,
        thinking=thinking,
    )


def row_thinking(
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    prompt_token_ids: list[int],
    output_token_ids: list[int],
) -> RowThinking | None:
    """When the reasoning of an answer that has begun with some output must end, if it must.

    Raises:
        InvalidRequestError: this model's answers do not mark their reasoning.
    """
    if params.thinking_token_budget is None:
        return None
    reasoning = None if tokenizer is None else tokenizer.answer_format.reasoning
    if tokenizer is None or reasoning is None:
        raise InvalidRequestError(
            "thinking_token_budget: this model marks no reasoning in its answers, or in an unknown way; "
            "leave it out, and limit the whole answer with max_tokens",
            "thinking_token_budget",
        )

    def ids(marker: str) -> list[int]:
        return tokenizer.encode(marker, add_special_tokens=False)

    start, end = map(ids, reasoning)
    # Offered or not, a call that begins in the reasoning must not be cut short.
    ends = [ids(marker) for marker in tokenizer.answer_format.markers("reasoning", tools=True)]
    inside = thinking_of(tokenizer, prompt_token_ids) == "open"
    so_far = ReasoningTokens(start, ends, in_reasoning=inside)
    so_far.add(output_token_ids)
    left = max(0, params.thinking_token_budget - so_far.count)
    return RowThinking(
        budget=left,
        start=start,
        ends=ends,
        closing=end,
        inside=so_far.inside,
        fragments=tokenizer.fragments,
    )


def continue_grammar(child: Request, parent: Request) -> None:
    """A fork of the same grammar goes on where its parent stands; one of another begins it."""
    if child.sampling.grammar is None or child.sampling.grammar != parent.sampling.grammar:
        return
    read = parent.sampling.num_grammar_tokens + parent.num_output_tokens
    child.sampling = msgspec.structs.replace(child.sampling, num_grammar_tokens=read)
