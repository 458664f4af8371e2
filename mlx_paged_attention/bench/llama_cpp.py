"""LlamaCpp: llama.cpp's benchmark programs as a contestant, on the same GGUF file.

``llama-batched-bench`` prints a table, ``llama-bench`` JSON; both say how long the prompts and how
long the tokens after them took (https://github.com/ggml-org/llama.cpp/tree/master/tools).
"""

import json
import os
import re
import subprocess
from pathlib import Path

from mlx_paged_attention.bench.load import Load
from mlx_paged_attention.bench.timing import Timing
from mlx_paged_attention.errors import InvalidRequestError, MlxPagedError
from mlx_paged_attention.models.source import ModelSource

# | PP | TG | B | N_KV | T_PP s | S_PP t/s | T_TG s | ...
_ROW = re.compile(
    r"^\|\s*(\d+) \|\s*(\d+) \|\s*(\d+) \|\s*\d+ \|\s*([\d.]+) \|\s*[\d.]+ \|\s*([\d.]+) \|", re.M
)
_CONTEXT_STEP = 256  # llama.cpp rounds each sequence's context up to a multiple of this


class LlamaCpp:
    """A process per run; loading the model is not in the times it reports.

    Args:
        program: ``llama-batched-bench``, or ``llama-bench`` for single requests.
        threads: how many it may use.
        on_cpu: keep all layers off the GPU.

    Raises:
        InvalidRequestError: the program cannot be run, or the model is no GGUF file.
    """

    name = "llama.cpp"

    def __init__(self, program: Path, source: ModelSource, *, threads: int, on_cpu: bool) -> None:
        if not (program.is_file() and os.access(program, os.X_OK)):
            raise InvalidRequestError(f"{program} is not a program that can be run", "llama_cpp")
        if not program.name.startswith(("llama-batched-bench", "llama-bench")):
            raise InvalidRequestError(
                f"{program.name} is not llama.cpp's llama-batched-bench or llama-bench", "llama_cpp"
            )
        if source.kind != "gguf":
            raise InvalidRequestError(
                f"llama.cpp reads GGUF files, and {source.name} is none: give a .gguf file as --model",
                "llama_cpp",
            )
        self._program = program
        self._model = source.path
        self._options = ["-t", str(threads), "-ngl", "0" if on_cpu else "99"]
        self.batches = program.name.startswith("llama-batched-bench")

    def run(self, load: Load) -> Timing:
        """Its own figures as token times: all prompts first, then steps of equal length.

        Raises:
            MlxPagedError: the program failed or said something else than expected.
        """
        lengths = {len(prompt) for prompt in load.prompts}
        assert len(lengths) == 1, "llama.cpp's programs take one prompt length"
        # A prompt's computation yields its first token: one decoding step less than tokens.
        count, length, steps = len(load.prompts), lengths.pop(), load.output_len - 1
        if self.batches:
            prefill, decode = self._batched(count, length, steps)
        else:
            assert count == 1, "llama-bench runs one sequence"
            prefill = self._single(["-p", str(length), "-n", "0"])
            decode = self._single(["-p", "0", "-n", str(steps), "-d", str(length)])
        times = [prefill + decode * step / steps for step in range(load.output_len)]
        return Timing([times] * count)

    def close(self) -> None:
        """Nothing is left running."""

    def _batched(self, count: int, length: int, steps: int) -> tuple[float, float]:
        per_sequence = -(-(length + steps) // _CONTEXT_STEP) * _CONTEXT_STEP
        numbers = {"-c": count * per_sequence, "-npp": length, "-ntg": steps, "-npl": count}
        output = self._call([text for flag, n in numbers.items() for text in (flag, str(n))])
        for row in _ROW.finditer(output):
            if (int(row[1]), int(row[2]), int(row[3])) == (length, steps, count):
                return float(row[4]), float(row[5])
        raise MlxPagedError(f"{self._program.name} printed no row for {count} requests: {_tail(output)}")

    def _single(self, arguments: list[str]) -> float:
        output = self._call([*arguments, "-r", "1", "-o", "json"], errors=False)
        try:
            (result,) = json.loads(output)
            return float(result["samples_ns"][0]) / 1e9
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise MlxPagedError(f"{self._program.name} printed unexpected JSON: {_tail(output)}") from error

    def _call(self, arguments: list[str], *, errors: bool = True) -> str:
        """What the program prints; with ``errors`` also on stderr, where some builds log."""
        command = [str(self._program), "-m", str(self._model), *self._options, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if result.returncode:
            raise MlxPagedError(
                f"{self._program.name} ended with status {result.returncode}: {_tail(result.stderr)}"
            )
        return result.stdout + (result.stderr if errors else "")


def _tail(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
