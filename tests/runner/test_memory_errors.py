import pytest

from mlx_paged_attention.runner.out_of_memory import out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[malloc] Unable to allocate 1024 bytes."),
        RuntimeError("[metal::malloc] Resource limit (499000) exceeded."),
        RuntimeError(
            "[metal::malloc] Attempting to allocate 48736917632 bytes which is greater than the maximum "
            "allowed buffer size of 30150672384 bytes."
        ),
        RuntimeError(
            "[METAL] Command buffer execution failed: Insufficient Memory "
            "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
        ),
        RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"),
    ],
)
def test_want_of_memory_is_told_from_other_errors(error: Exception) -> None:
    assert out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("[matmul] shapes do not match"), ValueError("out of memory"), KeyError("a")]
)
def test_other_errors_are_none(error: Exception) -> None:
    assert not out_of_memory(error)
