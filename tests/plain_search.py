"""Beam search over mlx-lm's logits, to compare with."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged_attention import SamplingParams


def beam_params(**options):
    return SamplingParams(**{"temperature": 0.0, "use_beam_search": True, "ignore_eos": True, **options})


class PlainSearch:
    """Beam search by the book: every step computes every beam from its first token."""

    def __init__(self, model):
        self._model = model
        self._known = {}

    def _logprobs(self, tokens):
        if tokens not in self._known:
            logits = self._model(mx.array([tokens]))[0, -1].astype(mx.float32)
            self._known[tokens] = np.array(logits - mx.logsumexp(logits), np.float64)
        return self._known[tokens]

    def run(self, prompt, width, steps, ends=(), length_penalty=1.0, early_stopping=False):
        beams, ended = [((), 0.0)], []

        def score(entry):
            tokens, logprob, stopped = entry
            return logprob / max(1, len(tokens) - stopped) ** length_penalty

        for step in range(steps):
            following = []
            for tokens, logprob in beams:
                scores = self._logprobs((*prompt, *tokens))
                for token in np.argsort(-scores, kind="stable")[: 2 * width].tolist():
                    longer = ((*tokens, token), logprob + scores[token])
                    (ended if token in ends else following).append(
                        (*longer, True) if token in ends else longer
                    )
            beams = sorted(following, key=lambda beam: -beam[1])[:width]
            if step == steps - 1:
                ended += [(*beam, False) for beam in beams]
                beams = []
            ended = sorted(ended, key=score, reverse=True)[:width]
            full = len(ended) == width
            if not beams or (full and early_stopping is True):
                break
            if full and early_stopping is False and score((*beams[0], False)) <= score(ended[-1]):
                break
        return ended


def assert_found(output, expected, n):
    assert len(output.outputs) == min(n, len(expected))
    for answer, (tokens, logprob, stopped) in zip(output.outputs, expected, strict=False):
        assert answer.token_ids == list(tokens)
        assert answer.cumulative_logprob == pytest.approx(logprob, abs=1e-4)
        assert answer.finish_reason == ("stop" if stopped else "length")
        assert answer.stop_reason == (tokens[-1] if stopped else None)
