"""What prefix caching costs where nothing is ever hit: its bookkeeping, against the time of whole requests.

    python benchmarks/prefix_cache_cost.py

The model computes the same with and without; what differs is hashing, looking up, publishing and evicting
blocks. So the same requests go through the scheduler alone, with the cache on and off, in turns, in a pool so
small that published blocks are evicted; and once through the engine, to see what share of it that is.
"""

import argparse
import statistics
import time

from mlx_paged_attention import LLM, SamplingParams
from mlx_paged_attention.bench.load import Prompts
from mlx_paged_attention.cache.block_hash import root_hash
from mlx_paged_attention.cache.manager import KVCacheManager
from mlx_paged_attention.sampling.params import RowSampling
from mlx_paged_attention.scheduler.request import Request
from mlx_paged_attention.scheduler.scheduler import Scheduler
from mlx_paged_attention.scheduler.step_plan import RowOutput, StepOutput

BLOCK_SIZE = 16
BUDGET = 256


def bookkeeping(prompts: list[list[int]], output_len: int, num_blocks: int, *, caching: bool) -> float:
    """Seconds that the scheduler takes for these requests, twice over, so that blocks are reused."""
    manager = KVCacheManager(num_blocks, BLOCK_SIZE, enable_caching=caching, root_hash=root_hash("0" * 64))
    longest = len(prompts[0]) + output_len + 1
    scheduler = Scheduler(
        manager, max_num_seqs=len(prompts), max_num_batched_tokens=BUDGET, max_model_len=longest
    )
    begin = time.perf_counter()
    for turn in range(2):
        for i, prompt in enumerate(prompts):
            own = [token + turn for token in prompt]
            request = Request(f"{turn} {i}", own, RowSampling(temperature=0.0), max_tokens=output_len)
            scheduler.add_request(request)
        while scheduler.has_unfinished_requests:
            plan = scheduler.schedule()
            rows = [RowOutput(row.request_id, [plan.step % 1000]) for row in plan.rows if row.sample]
            scheduler.update(plan, StepOutput(plan.step, rows))
    return (time.perf_counter() - begin) / 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=9)
    arguments = parser.parse_args()
    requests, output_len = arguments.requests, arguments.output_len

    prompts = Prompts(0, 40_000).draw("cost", requests, arguments.input_len)
    per_request = -(-(arguments.input_len + output_len) // BLOCK_SIZE)
    num_blocks = 1 + requests * per_request
    on, off = [], []
    for _ in range(arguments.pairs):
        on.append(bookkeeping(prompts, output_len, num_blocks, caching=True))
        off.append(bookkeeping(prompts, output_len, num_blocks, caching=False))
    extra = [a - b for a, b in zip(on, off, strict=True)]

    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    with LLM(device="cpu", skip_tokenizer_init=True, num_blocks=num_blocks, max_num_seqs=requests) as llm:
        llm.generate(prompts[:1], params, use_tqdm=False)  # warm
        begin = time.perf_counter()
        llm.generate([[token + 2 for token in prompt] for prompt in prompts], params, use_tqdm=False)
        whole = time.perf_counter() - begin

    print(f"{requests} requests of {arguments.input_len} + {output_len} tokens, {arguments.pairs} runs each")
    for name, values in (("caching on", on), ("caching off", off), ("difference", extra)):
        middle, low, high = statistics.median(values), min(values), max(values)
        print(f"{name:<12} {middle * 1e3:7.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f})")
    share = statistics.median(extra) / whole
    print(f"the engine takes {whole:.1f} s for them: prefix caching without hits costs {share:.3%} of that")


if __name__ == "__main__":
    main()
