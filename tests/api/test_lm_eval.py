"""lm-evaluation-harness against ``/v1/completions``: its numbers are mlx-lm's own.

Needs ``pip install 'lm-eval[api]'``; run with ``pytest -m slow tests/api/test_lm_eval.py``.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import Oracle

from mlx_paged_attention.api.async_llm import AsyncLLM
from mlx_paged_attention.models.load import load_model
from mlx_paged_attention.models.source import resolve

pytestmark = [pytest.mark.model, pytest.mark.slow]

QUESTIONS = [
    ("The capital of France is", ["Paris", "Rome", "a cheese"], 0),
    ("The capital of Italy is", ["Paris", "Rome", "a boat"], 1),
    ("Two and two make", ["three", "four", "a hundred and one"], 1),
    ("Water freezes at zero degrees", ["Celsius", "Fahrenheit", "sideways"], 0),
    ("The opposite of hot is", ["cold", "warm", "green"], 0),
    ("A day has twenty-four", ["minutes", "hours", "weeks"], 1),
    ("The sun rises in the", ["west", "north", "east"], 2),
    ("Caf\u00e9 na\u00efve \N{GRINNING FACE}:", ["r\u00e9sum\u00e9", "\N{SNOWMAN} and", "\u65e5\u672c"], 0),
    ("def add(a, b):\n    return a", ["+ b", "- b", "* a"], 0),
    ("Once upon a time, there was a", ["little girl", "of the", "quickly"], 0),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(max_model_len=512, num_blocks=257)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def reference() -> Oracle:
    loaded = load_model(resolve(None, progress=False), dtype="auto", device="cpu")
    return Oracle.with_weights_of(loaded.model, loaded.config)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.timeout(1200)
def test_a_loglikelihood_task_gives_mlx_lms_numbers(
    llm: AsyncLLM,
    reference: Oracle,
    serve: Callable[..., AbstractContextManager[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch_size: int,
) -> None:
    monkeypatch.setitem(os.environ, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    lm_eval: Any = pytest.importorskip("lm_eval")
    data = tmp_path / "questions.jsonl"
    lines = [{"text": text, "choices": choices, "answer": answer} for text, choices, answer in QUESTIONS]
    data.write_text("\n".join(json.dumps(line) for line in lines))
    task = {
        "task": "questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
    }
    with serve(llm) as url:
        # The tokenizer is ours, over /tokenizer_info, /tokenize and /detokenize.
        arguments = {
            "model": llm.info.model,
            "base_url": f"{url}/v1/completions",
            "tokenizer_backend": "remote",
            "num_concurrent": 2,
            "max_length": 512,
        }
        results = lm_eval.simple_evaluate(
            model="local-completions",
            model_args=arguments,
            tasks=[task],
            batch_size=batch_size,
            log_samples=True,
            bootstrap_iters=0,
        )
    assert llm.tokenizer is not None
    samples = results["samples"]["questions"]
    assert len(samples) == len(QUESTIONS)
    largest = 0.0
    for sample in samples:
        text = sample["doc"]["text"]
        context = llm.tokenizer.encode(text)
        for choice, (value, greedy) in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            ids = llm.tokenizer.encode(f"{text} {choice}")
            assert ids[: len(context)] == context, "the harness splits where tokens end"
            logprobs = reference.prompt_logprobs(ids)
            own = ids[len(context) :]
            rows = logprobs[len(context) - 1 : len(ids) - 1]
            expected = float(sum(row[token] for row, token in zip(rows, own, strict=True)))
            largest = max(largest, abs(float(value) - expected))
            assert greedy == all(int(np.argmax(row)) == token for row, token in zip(rows, own, strict=True))
    print(f"largest difference to mlx-lm: {largest:.2e}; accuracy {results['results']['questions']}")
    assert largest < 1e-4
