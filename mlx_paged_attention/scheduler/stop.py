"""When a token ends its sequence."""

from mlx_paged_attention.scheduler.request import Request, RequestStatus


def check_stop(request: Request, max_model_len: int) -> tuple[RequestStatus, int | None] | None:
    """How the request's last token ends it: final status and stop reason, or ``None`` if it goes on.

    End of sequence comes before length: a last allowed token that is one reports ``"stop"``.
    ``min_tokens`` holds back stop tokens, not the limits on length.
    """
    last = request.token_ids[-1]
    if request.num_output_tokens >= request.min_tokens:
        if last in request.eos_token_ids and not request.ignore_eos:
            return RequestStatus.FINISHED_STOPPED, None
        if last in request.stop_token_ids:
            return RequestStatus.FINISHED_STOPPED, last
    if ends_by_length(request, request.num_tokens, max_model_len):
        return RequestStatus.FINISHED_LENGTH, None
    return None


def ends_by_length(request: Request, num_tokens: int, max_model_len: int) -> bool:
    """Whether the request is complete once it has this many tokens, whatever they are."""
    return num_tokens >= max_model_len or num_tokens - request.num_prompt_tokens >= request.max_tokens


def can_go_ahead(request: Request, max_model_len: int) -> bool:
    """Whether the token after the one that is on its way may be computed now."""
    one_on_its_way = request.num_samples_in_flight == 1 and request.num_computed_tokens == request.num_tokens
    ends = ends_by_length(request, request.num_tokens + 1, max_model_len)
    return one_on_its_way and request.runs_ahead and not ends
