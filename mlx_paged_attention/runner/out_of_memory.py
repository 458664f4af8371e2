"""out_of_memory: whether a step failed because there was no memory for it."""

# What MLX's allocators and command buffers say, in lower case.
_WORDS = (
    "malloc]",  # "[malloc] Unable to allocate ...", "[metal::malloc] Resource limit ... exceeded."
    "unable to allocate",
    "out of memory",
    "outofmemory",  # kIOGPUCommandBufferCallbackErrorOutOfMemory
    "insufficient memory",
    "cudamalloc",
    "cudaerrormemoryallocation",
)


def out_of_memory(error: BaseException) -> bool:
    """MLX has no exception of its own for this: its ``RuntimeError`` says so in words."""
    if isinstance(error, MemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in message for words in _WORDS)
