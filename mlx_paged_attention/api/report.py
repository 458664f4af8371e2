"""What a person sees when an engine has started, and when it has answered."""

from mlx_paged_attention.engine.outputs import EngineInfo


def startup_report(info: EngineInfo) -> str:
    """The model, how it runs, and what its KV cache holds; several lines."""
    usable = info.num_blocks - 1  # the null block holds nobody's tokens
    lines = [
        f"model     {info.model}: {info.dtype} on {info.backend}, {info.forward}",
        f"KV cache  {usable:,} blocks of {info.block_size} tokens, {size(info.bytes_per_token)} per token, "
        f"pool {size(info.pool_bytes)}",
        f"requests  up to {info.max_model_len:,} tokens each; the pool holds {info.full_length_requests:.1f} "
        "that long at once",
        f"steps     up to {info.max_num_seqs:,} requests and {info.max_num_batched_tokens:,} tokens each",
        *(f"note      {note}" for note in info.notes),
    ]
    return "\n".join(lines)


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
        f"{prompt_tokens:,} prompt tokens{cached}, "
        f"{tokens:,} generated in {seconds:.1f} s: {rate:.1f} tokens/s"
    )
