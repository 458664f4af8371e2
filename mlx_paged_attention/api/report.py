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
        *_memory(info),
        f"KV cache  {blocks} of {counted(info.block_size, 'token')} (and the null block), "
        f"{per_token(info.bytes_per_token, info.windows, info.bytes_beyond_windows)}, pool {_pool(info)}",
        *states,
        f"longest   a context of {counted(info.longest_sequence, 'token')} fits; "
        f"the KV cache holds {counted((info.num_blocks - 1) * info.block_size, 'token')}",
        f"requests  up to {counted(min(info.max_model_len, info.longest_sequence), 'token')} each; the KV "
        f"cache holds {max(1.0, info.full_length_requests):.1f} that long at once",
        f"steps     up to {counted(info.max_num_seqs, 'request')} and "
        f"{counted(info.max_num_batched_tokens, 'token')} each",
        *(f"note      {note}" for note in info.notes),
    ]
    return "\n".join(lines)


def per_token(count: int, windows: Sequence[int | None], beyond: int) -> str:
    """``24.0 KiB per token``, and what is left of it behind the windows of layer groups."""
    freed = "" if set(windows) == {None} else f" (behind windows {size(beyond)})"
    return f"{size(count)} per token{freed}"


def _memory(info: EngineInfo) -> list[str]:
    """The arithmetic behind the pool's size, a line for each number."""
    memory = info.memory
    if memory is None:
        return []
    parts = [
        (memory.total, f"{memory.limited_by}, weights included"),
        (-memory.weights, "weights"),
        (-memory.activations, f"activations of a step of {counted(info.max_num_batched_tokens, 'token')}"),
        (-memory.copies, "at most, copies of contexts"),
    ]
    lines = [f"{'-' if n < 0 else ' '} {size(abs(n)):>9}  {text}" for n, text in parts if n]
    left = size(max(0, memory.left))
    lines.append(f"= {left:>9}  left; the KV cache may take {size(info.pool_bytes)} of it")
    return [f"{'memory' if i == 0 else '':<10}{line}" for i, line in enumerate(lines)]


def _pool(info: EngineInfo) -> str:
    if not info.start_blocks:
        return size(info.pool_bytes)
    start = info.pool_bytes // info.num_blocks * info.start_blocks
    return f"{size(start)}, which grows to {size(info.pool_bytes)} as it is needed"


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
