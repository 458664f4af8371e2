"""How much of a prompt the prefix cache should find."""


def hit_length(
    prompt: int, computed: int, shared: int | None = None, block_size: int = 16, *, parts: bool = True
) -> int:
    """Tokens found of a prompt that begins as a sequence does that was computed before it.

    Args:
        prompt: the prompt's length.
        computed: how many tokens of the other sequence were computed.
        shared: how many they have in common; by default the whole prompt.
        parts: parts of blocks are found, as they are where all layers are one group.
    """
    shared = prompt if shared is None else shared
    found = min(shared, computed) // block_size * block_size
    if found >= prompt:
        return prompt - 1  # the last one is computed again, for its logits
    within = min(shared, prompt - 1) - found
    published = computed >= found + block_size
    return found + (within if parts and published and within >= block_size // 4 else 0)
