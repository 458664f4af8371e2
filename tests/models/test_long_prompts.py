"""Long prompts take memory in proportion to their length, not to its square, in a single step, too."""

import dataclasses
import subprocess
import sys

import pytest
from tiny_configs import tiny_row
from tiny_models import write_model

LENGTHS = [8192, pytest.param(32_768, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
CODE = """
import resource, sys
import mlx_paged_attention
from mlx_paged_attention import LLM, SamplingParams

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

directory, length = sys.argv[1], int(sys.argv[2])
llm = LLM(model=directory, skip_tokenizer_init=True, device="cpu", num_blocks=length // 16 + 8,
          max_model_len=length + 64, max_num_seqs=4,
          max_num_batched_tokens=length)  # in one step, whatever that takes
params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
prompt = [(7 * i + i * i) % 250 + 3 for i in range(length)]
llm.generate([prompt[:1024]], params, use_tqdm=False)
before = peak()
(output,) = llm.generate([prompt], params, use_tqdm=False)
assert len(output.outputs[0].token_ids) == 4
print(peak() - before - llm.info.pool_bytes, llm.info.forward)
llm.close()
"""
# A slice of scores and the few arrays made of it, whatever the length.
MOST_BYTES = 640 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("name", "forward"), [("qwen3", "packed rows"), ("deepseek_v3", "row layout"), ("mamba2", "row layout")]
)
def test_a_long_prompt_takes_a_fixed_memory_beyond_its_pool(name, forward, length, tmp_path):
    tiny = tiny_row(name)
    tiny = dataclasses.replace(tiny, config={**tiny.config, "max_position_embeddings": length + 64})
    command = [sys.executable, "-c", CODE, str(write_model(tiny, tmp_path / name)), str(length)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    rise, how = result.stdout.strip().split(" ", 1)
    assert how == forward
    assert int(rise) < MOST_BYTES, f"{int(rise) >> 20} MiB"
