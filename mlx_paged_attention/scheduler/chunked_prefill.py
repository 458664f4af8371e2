"""ChunkedPrefill: how a prompt is spread over steps."""

from mlx_paged_attention.scheduler.request import Request

# A request that wants log-probabilities of its prompt needs logits of every prompt token it computes:
# 256 rows of a vocabulary of 150,000 are 150 MB.
MAX_SCORED_TOKENS = 256


class ChunkedPrefill:
    """How many tokens one request computes in one step.

    Attributes:
        threshold: at most.
        enabled: prompts may be cut at all.
    """

    def __init__(self, threshold: int, *, enabled: bool) -> None:
        self.threshold = threshold
        self.enabled = enabled

    def limit(self, request: Request) -> int:
        """Most tokens that the request computes in a step, whatever others do."""
        if request.sampling.prompt_logprobs is None or not self.enabled:
            return self.threshold
        return min(self.threshold, MAX_SCORED_TOKENS)

    def chunk(self, request: Request, budget: int, *, num_after: int, kept: int) -> int:
        """Tokens of a running request for a step; none if all that it knows have been planned.

        Args:
            budget: of the step, as far as it is left.
            num_after: running requests that come after it.
            kept: tokens of the budget for requests that wait.
        """
        missing = len(request.token_ids) - request.num_computed_tokens
        num_tokens = min(missing, self.limit(request), budget)
        if num_tokens <= 0 or not self.enabled:
            return num_tokens
        # A prompt leaves a token to each request after it, and something to those that wait,
        # unless it ends with this step.
        most = max(1, budget - num_after)
        ends = num_tokens == missing and num_tokens <= most
        return num_tokens if ends else max(1, min(num_tokens, most - kept))
