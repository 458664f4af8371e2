"""What a person sees when an engine has started, and when it has answered."""

from collections.abc import Sequence

from mlx_paged_attention.engine.outputs import CompletionOutput, EngineInfo, RequestOutput


def startup_report(info: EngineInfo) -> str:
    """The model, how it runs, and what its KV cache holds; several lines."""
    blocks = counted(info.num_blocks - 1, "block")  # the null block holds nobody's tokens
    states = []
    if info.num_states:
        kept = f"{counted(info.num_states - 1, 'state')} of {size(info.bytes_per_state)}"
        states.append(f"states    {kept}, one or two per request, the others after prefixes")
    lines = [
        f"model     {info.model}: {info.dtype} on {info.backend}, {info.forward}",
        f"KV cache  {blocks} of {counted(info.block_size, 'token')} (and the null block), "
        f"{per_token(info.bytes_per_token, info.windows, info.bytes_beyond_windows)}, "
        f"pool {size(info.pool_bytes)}",
        *states,
        f"requests  up to {counted(info.max_model_len, 'token')} each; the pool holds "
        f"{info.full_length_requests:.1f} that long at once",
        f"steps     up to {counted(info.max_num_seqs, 'request')} and "
        f"{counted(info.max_num_batched_tokens, 'token')} each",
        *(f"note      {note}" for note in info.notes),
    ]
    return "\n".join(lines)


def per_token(count: int, windows: Sequence[int | None], beyond: int) -> str:
    """``24.0 KiB per token``, and what is left of it behind the windows of layer groups."""
    freed = "" if set(windows) == {None} else f" (behind windows {size(beyond)})"
    return f"{size(count)} per token{freed}"


def counted(number: int, noun: str) -> str:
    """``1 block``, ``2,000 blocks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(count: float) -> str:
    """Bytes for a person: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def speed_report(prompt_tokens: int, cached_tokens: int, tokens: int, seconds: float) -> str:
    """One line about an answer, or about several given at once."""
    cached = f" ({cached_tokens:,} cached)" if cached_tokens else ""
    rate = tokens / seconds if seconds else 0.0
    return (
        f"{counted(prompt_tokens, 'prompt token')}{cached}, "
        f"{tokens:,} generated in {seconds:.1f} s: {rate:.1f} tokens/s"
    )


def cut_report(outputs: Sequence[RequestOutput], max_tokens: int | None, info: EngineInfo) -> str | None:
    """One line about the limits that cut answers short; ``None`` if all came to their own end."""
    answers = [answer for output in outputs for answer in output.outputs]
    cut = [answer for answer in answers if answer.finish_reason == "length"]
    if not cut:
        return None
    limits = dict.fromkeys(_limit(answer, max_tokens, info) for answer in cut)
    which = "" if len(answers) == 1 else f"{len(cut)} of {len(answers)} answers "
    return f"{which}stopped at {' or '.join(limits)}"


def _limit(answer: CompletionOutput, max_tokens: int | None, info: EngineInfo) -> str:
    if max_tokens is not None and len(answer.token_ids) >= max_tokens:
        return f"--max-tokens {max_tokens}"
    capacity = info.longest_sequence
    if capacity < info.max_model_len:
        return f"{counted(capacity, 'token')}, which fill the KV cache"
    return f"max_model_len {info.max_model_len}"
