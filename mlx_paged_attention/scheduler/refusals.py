"""What a scheduler refuses, with the numbers that it cannot bring together."""

from mlx_paged_attention.cache.manager import KVCacheManager
from mlx_paged_attention.errors import InvalidRequestError, RequestTooLongError
from mlx_paged_attention.scheduler.request import Request


def check_limits(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    long_prefill_token_threshold: int,
    enable_chunked_prefill: bool,
) -> None:
    """Refuses limits under which some request would never be served.

    Raises:
        InvalidRequestError: it names the limit.
    """
    if max_num_batched_tokens < max_num_seqs:
        raise InvalidRequestError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs "
            f"({max_num_seqs}): every running request needs one token per step",
            "max_num_batched_tokens",
        )
    if not enable_chunked_prefill and (
        max_num_batched_tokens < max_model_len or long_prefill_token_threshold
    ):
        raise InvalidRequestError(
            "without chunked prefill a prompt is computed in one step: max_num_batched_tokens "
            f"({max_num_batched_tokens}) must be at least max_model_len ({max_model_len}) and "
            f"long_prefill_token_threshold ({long_prefill_token_threshold}) must be 0",
            "enable_chunked_prefill",
        )


def check_fits(request: Request, manager: KVCacheManager, max_model_len: int) -> None:
    """Refuses what could never be served, so that it cannot block the queue.

    Raises:
        RequestTooLongError: with the size asked for and the limit.
    """
    prompt = request.num_prompt_tokens
    if prompt >= max_model_len:
        pool_holds = manager.need.longest(manager.num_usable_blocks, prompt + 1)
        what = "raise max_model_len" if pool_holds > prompt else "enlarge the pool (kv_memory)"
        # By "prompt is too long" agents and client libraries know that a conversation must be made shorter.
        raise RequestTooLongError(
            f"the prompt is too long: it has {prompt} tokens; with max_model_len {max_model_len} it can have "
            f"at most {max_model_len - 1}. Shorten the prompt or {what}",
            "prompt",
        )
    longest = min(prompt + request.max_tokens, max_model_len)
    needed, usable = manager.need.most(longest), manager.num_usable_blocks
    if needed > usable:
        size, fits = manager.block_size, manager.need.longest(usable, longest)
        raise RequestTooLongError(
            f"prompt and answer may take {longest} tokens, that is {needed} KV blocks of {size}; "
            f"the pool has {usable} ({fits} tokens). Shorten the prompt, lower max_tokens or "
            "enlarge the pool (kv_memory)",
            "max_tokens",
        )
