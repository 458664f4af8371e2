"""The paged attention kernels on a real GPU: are they right, and how fast are they?

    python benchmarks/cuda_kernels.py [--skip-check] [--tune] [--latents]

Checks a grid of shapes against a float64 computation, then times paged decode against MLX's attention
over contiguous keys and values of the same tokens. Prints tables as it goes; takes under four minutes.
Bandwidths count bytes of keys and values read; the copy's count bytes read and written. With --latents it
does the same for latent attention alone, in a minute: against what models do with latents that are
gathered, and with latents that lie contiguous anyway.
"""

import argparse
import itertools
import math
import time
import traceback
from collections.abc import Callable, Iterator

import mlx_paged_attention  # noqa: F401  (before mlx.core: chooses MLX's BLAS on Linux)

# isort: split
import mlx.core as mx
import numpy as np

from mlx_paged_attention.kernel_check.decode_case import LSE_FACTOR, TOLERANCE, DecodeCase
from mlx_paged_attention.kernel_check.latent_case import LatentCase
from mlx_paged_attention.kernel_check.speed_case import SpeedCase, gap, seconds_per_call
from mlx_paged_attention.ops.kernels import latent
from mlx_paged_attention.ops.kernels.make import backend, upload
from mlx_paged_attention.ops.kernels.order import no_token
from mlx_paged_attention.ops.kernels.pool import copy_blocks, gather_kv, write_kv
from mlx_paged_attention.ops.kernels.work_list import work_list
from mlx_paged_attention.ops.latent_attention import plain_latent_attention
from mlx_paged_attention.ops.paged_attention import gather_blocks

NAMES = {mx.float32: "fp32", mx.float16: "fp16", mx.bfloat16: "bf16"}


# ---- Is it right?


def decode_checks() -> Iterator[tuple[str, Callable[[], tuple[mx.Dtype, float, float]]]]:
    edges = [0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 523, 37, 2011]

    def case(name, dtype, heads, contexts, target=64, **options):
        def run():
            return dtype, *DecodeCase.random(len(name), dtype, heads, contexts, **options).errors(target)

        return f"{NAMES[dtype]} {heads} {name}", run

    for dtype in TOLERANCE:
        yield case("edges", dtype, (32, 8, 128, 128), edges)
    for dim in (64, 96, 192, 256):
        yield case("head dims", mx.bfloat16, (8, 2, dim, dim), edges)
    for dtype, dim in ((mx.float16, 80), (mx.float16, 112), (mx.float32, 64)):
        yield case("head dims", dtype, (8, 2, dim, dim), edges)
    yield case("k and v differ", mx.bfloat16, (16, 4, 192, 128), edges)
    for heads in ((4, 4), (5, 1), (64, 8), (16, 1), (40, 1)):
        yield case("groups", mx.float16, (*heads, 64, 64), edges)
    for size in (8, 32, 64):
        yield case(f"blocks of {size}", mx.float16, (8, 2, 64, 64), edges, size=size)
    for window in (8, 64, 700):
        yield case(f"window {window}", mx.float16, (8, 2, 64, 64), edges, window=window)
    yield case("sinks", mx.float16, (8, 2, 64, 64), edges, sink=2.0)
    yield case("sinks, one piece", mx.float16, (8, 2, 64, 64), edges[:8], sink=-5.0, target=1)
    yield case("soft cap", mx.float32, (8, 2, 64, 64), edges, softcap=50.0)
    yield case("5 queries", mx.bfloat16, (32, 8, 128, 128), edges[4:], queries=5)
    yield case("16 queries, window", mx.float32, (8, 2, 64, 64), edges[6:], queries=16, window=64)
    yield case("long", mx.bfloat16, (32, 8, 128, 128), [8192, 8191, 1], target=1600)


def pool_check() -> float:
    """write_kv, copy_blocks and gather_kv in a chain of tokens; 0 if all is in place."""
    rng = np.random.default_rng(0)
    pools = [mx.zeros((9, 2, 16, d), mx.bfloat16) for d in (128, 64)]
    k, v = (
        mx.array(rng.standard_normal((3, 2, 1, d)).astype(np.float32)).astype(mx.bfloat16) for d in (128, 64)
    )
    mx.eval(pools)
    done = write_kv(k, v, *pools, mx.array(np.array([5 * 16, 5 * 16 + 15, 2 * 16 + 3], np.int32)), no_token())
    done = copy_blocks(*pools, mx.array([5], mx.int32), mx.array([7], mx.int32), done)
    keys, values, _ = gather_kv(*pools, mx.array([2, 7], mx.int32), 3, 32, done)
    error = 0.0
    for got, new in ((keys, k), (values, v)):
        for position, row in ((0, 2), (13, 0), (28, 1)):
            error = max(error, float(mx.abs(got[0, :, position] - new[row, :, 0]).max()))
        error = max(error, float(mx.abs(got[0, :, 1:13]).max()))
    return error


def latent_checks() -> Iterator[tuple[str, Callable[[], tuple[mx.Dtype, float, float]]]]:
    edges = [0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 523, 2011]
    for dtype, heads, dims, size in (
        (mx.bfloat16, 16, (512, 64), 16),
        (mx.bfloat16, 128, (512, 64), 64),
        (mx.float16, 40, (256, 32), 8),
        (mx.float32, 20, (512, 64), 16),
    ):
        for target in (1, 64):

            def run(dtype=dtype, heads=heads, dims=dims, size=size, target=target):
                return dtype, *LatentCase.random(0, dtype, heads, dims, edges, size=size).errors(target)

            yield f"{NAMES[dtype]} {heads} {dims} blocks of {size}{', in pieces' * (target > 1)}", run


def check(checks: Iterator[tuple[str, Callable[[], tuple[mx.Dtype, float, float]]]]) -> None:
    print("\nRight? largest error / largest value, and error of the log-sum-exp", flush=True)
    failed = 0
    try:
        error = pool_check()
        failed += error != 0
        print(f"  {'ok  ' if error == 0 else 'FAIL'} write, copy and gather: {error}")
    except Exception:
        failed += 1
        traceback.print_exc()
    for name, run in checks:
        try:
            dtype, error, lse_error = run()
            good = error <= TOLERANCE[dtype] and lse_error <= LSE_FACTOR * TOLERANCE[dtype]
            failed += not good
            print(f"  {'ok  ' if good else 'FAIL'} {name:45} {error:.1e} {lse_error:.1e}", flush=True)
        except Exception as e:
            failed += 1
            print(f"  FAIL {name}: {str(e)[:2000]}", flush=True)
    print(f"  {failed} failed", flush=True)


# ---- How fast is it?


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of the fastest of two element-wise operations on 4 GB."""
    x = mx.random.randint(0, 1 << 30, (1 << 30,), mx.int32)
    mx.eval(x)
    best = 0.0
    for function in (mx.negative, lambda a: a + 1):

        def chain(links: int, function=function) -> mx.array:
            y = x
            for _ in range(links):
                y = function(y)
            return y

        best = max(best, 2 * x.nbytes / seconds_per_call(chain, 0.3))
    return best


def time_both(
    case: SpeedCase, heads: int, target: int | None = None, dense: bool = True, budget: float = 0.15
) -> tuple[float, float, float]:
    """Seconds of paged and of contiguous attention, and how far their results are apart."""
    paged, contiguous = case.chains(heads, target)
    apart = gap(paged(1), contiguous(1)) if dense else 0.0
    dense_time = seconds_per_call(contiguous, budget) if dense else math.nan
    return seconds_per_call(paged, budget), dense_time, apart


HEADS = (16, 32, 64)
TARGETS = (66, 132, 264, 528, 1056, 2112, 4224)
GRID = list(itertools.product((1, 8, 32, 128), (1024, 4096, 16384)))


def speed(copy: float) -> None:
    print("\nrows  context  heads   KV GB | paged µs  GB/s  of copy | contiguous µs  GB/s | ratio  differ by")
    for rows, context in GRID:
        try:
            case = SpeedCase(rows, context, 8, 128, spread=400 << 20)
            for heads in HEADS:
                paged, dense, gap = time_both(case, heads)
                rate = case.kv_bytes / paged
                size = case.kv_bytes / 1e9
                print(
                    f"{rows:4} {context:8} ({heads:2},8) {size:7.3f} | {paged * 1e6:8.1f} {rate / 1e9:5.0f} "
                    f"{rate / copy:7.1%}  | {dense * 1e6:9.1f} {size / dense:9.0f} | "
                    f"{dense / paged:5.2f}  {gap:.0e}",
                    flush=True,
                )
        except Exception as e:
            print(f"{rows:4} {context:8} failed: {str(e)[:500]}", flush=True)
        case = None
        mx.clear_cache()


def tune() -> None:
    print("\nµs by threadgroups aimed for")
    print("rows  context  heads  | contiguous | " + " ".join(f"{t:7}" for t in TARGETS) + " | best ratio")
    for rows, context in GRID:
        case = SpeedCase(rows, context, 8, 128, spread=400 << 20)
        for heads in HEADS:
            first, dense, _ = time_both(case, heads, TARGETS[0], budget=0.06)
            times = [first, *(time_both(case, heads, target, False, 0.06)[0] for target in TARGETS[1:])]
            figures = " ".join(f"{t * 1e6:7.1f}" for t in times)
            print(
                f"{rows:4} {context:8} ({heads:2},8) | {dense * 1e6:10.1f} | {figures} | "
                f"{dense / min(times):.2f}",
                flush=True,
            )
        case = None
        mx.clear_cache()


class LatentSpeedCase:
    """Random bfloat16 latents of 512 and 64 dimensions in a shuffled pool, enough to outgrow caches."""

    def __init__(self, rows: int, context: int, heads: int) -> None:
        width = context // 16
        self.bytes = rows * context * (512 + 64) * 2
        sets = max(1, min(8, (400 << 20) // self.bytes))
        blocks = 1 + sets * rows * width
        order = np.random.default_rng(0).permutation(np.arange(1, blocks, dtype=np.int32))
        self.tables = [mx.array(table) for table in order.reshape(sets, rows, width)]
        self.pools = [mx.random.normal((blocks, 1, 16, dim), mx.bfloat16) for dim in (512, 64)]
        self.q = mx.random.normal((rows, heads, 1, 512), mx.bfloat16)
        self.q_rope = mx.random.normal((rows, heads, 1, 64), mx.bfloat16) * 0.1
        self.lens = np.full(rows, context, np.int32)
        self.mask = mx.ones((rows, 1, 1, context), mx.bool_)
        self.contiguous = [[gather_blocks(pool, table) for pool in self.pools] for table in self.tables]
        mx.eval(self.pools, self.q, self.q_rope, self.mask, self.contiguous)

    def chains(self, target: int | None = None) -> list[Callable[[int], mx.array]]:
        """The kernel, what a model does with gathered latents, and with contiguous ones."""
        each, lens = latent.latent_threadgroups_per_item(self.q, self.pools[0]), upload(self.lens)
        work = work_list(self.lens, 1, block_size=16, threadgroups_per_item=each, target=target)

        def paged(q, i):
            return latent.latent_decode(q, self.q_rope, *self.pools, self.tables[i], lens, work, scale=0.1)[0]

        def gathered(q, i):
            latents, ropes = (gather_blocks(pool, self.tables[i]) for pool in self.pools)
            return plain_latent_attention(q, self.q_rope, latents, ropes, self.mask, scale=0.1)

        def contiguous(q, i):
            return plain_latent_attention(q, self.q_rope, *self.contiguous[i], self.mask, scale=0.1)

        def chain_of(call):
            def chain(links: int) -> mx.array:
                q = self.q
                for i in range(links):
                    q = call(q, i % len(self.tables))
                return q

            return chain

        return [chain_of(call) for call in (paged, gathered, contiguous)]


LATENT_GRID = list(itertools.product((1, 8, 32), (1024, 4096, 16384), (16, 32, 128)))


def latent_speed(copy: float) -> None:
    print(
        "\nrows  context  heads | paged µs  GB/s  of copy | gathered µs  ratio | "
        "contiguous µs  ratio | differ by"
    )
    for rows, context, heads in LATENT_GRID:
        try:
            case = LatentSpeedCase(rows, context, heads)
            chains = case.chains()
            apart = gap(chains[0](1), chains[2](1))
            paged, gathered, contiguous = (seconds_per_call(chain, 0.1) for chain in chains)
            print(
                f"{rows:4} {context:8} {heads:6} | {paged * 1e6:8.1f} {case.bytes / paged / 1e9:5.0f} "
                f"{case.bytes / paged / copy:7.1%}  | {gathered * 1e6:11.1f} {gathered / paged:6.2f} | "
                f"{contiguous * 1e6:13.1f} {contiguous / paged:6.2f} | {apart:.0e}",
                flush=True,
            )
        except Exception as e:
            print(f"{rows:4} {context:8} {heads:6} failed: {str(e)[:500]}", flush=True)
        case = chains = None
        mx.clear_cache()


def tune_latents() -> None:
    variants, targets = list(itertools.product((1, 2), (16, 32))), (None, 66, 132, 264, 528)
    print("\nµs by tiles of 16 heads x keys per step, and by threadgroups aimed for (None: the estimate's)")
    for rows, context, heads in (
        (1, 4096, 16),
        (1, 16384, 128),
        (8, 4096, 16),
        (8, 4096, 128),
        (32, 4096, 32),
    ):
        case = LatentSpeedCase(rows, context, heads)
        for tiles, keys in variants:
            latent.tiles, latent.keys_per_step = lambda *_, n=tiles: n, lambda *_, n=keys: n
            times = (seconds_per_call(case.chains(target)[0], 0.04) * 1e6 for target in targets)
            figures = "  ".join(f"{target}: {t:6.1f}" for target, t in zip(targets, times, strict=True))
            print(f"{rows:4} {context:8} {heads:6} | {tiles} x {keys} | {figures}", flush=True)
        case = None
        mx.clear_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--skip-check", action="store_true", help="time only")
    parser.add_argument("--tune", action="store_true", help="also time other sizes of work lists")
    parser.add_argument("--latents", action="store_true", help="latent attention, and nothing else")
    arguments = parser.parse_args()
    if backend() is None:
        parser.error("MLX has no GPU here")
    begin = time.perf_counter()
    print(f"mlx {mx.__version__}, {mx.device_info().get('device_name', '?')}, kernels for {backend()}")
    if not arguments.skip_check:
        check(latent_checks() if arguments.latents else decode_checks())
    print(f"[{time.perf_counter() - begin:.0f} s]")
    copy = copy_bandwidth()
    print(f"\nDevice copy: {copy / 1e9:.0f} GB/s", flush=True)
    mx.clear_cache()
    if arguments.latents:
        latent_speed(copy)
    else:
        speed(copy)
    print(f"[{time.perf_counter() - begin:.0f} s]")
    if arguments.tune:
        (tune_latents if arguments.latents else tune)()
        print(f"[{time.perf_counter() - begin:.0f} s]")


if __name__ == "__main__":
    main()
