"""What a caller gets back: RequestOutput, CompletionOutput, and the engine's statistics."""

from dataclasses import dataclass, field

from mlx_paged_attention.cache.block_need import BlockNeed


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log-probability of a token, before temperature, penalties and masks.

    Attributes:
        rank: 1 for the most likely token.
        decoded_token: the token's text, ``None`` without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that was offered.

    Attributes:
        arguments: the text of a JSON object.
    """

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An answer in a conversation, as its model's format tells its parts apart.

    Attributes:
        content: the answer proper.
        reasoning: what was thought before.
    """

    content: str
    reasoning: str
    tool_calls: list[ToolCall]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer.

    Attributes:
        index: which of the request's ``n`` answers.
        text: the answer so far (or the new part, in a delta stream).
        token_ids: its tokens (or the new ones, in a delta stream).
        logprobs: per token, the sampled token and the alternatives by id; ``None`` unless asked.
        cumulative_logprob: sum over all tokens so far; ``None`` unless logprobs were asked for.
        finish_reason: ``"stop"``, ``"length"``, ``"abort"`` or ``None`` while it runs.
        stop_reason: the stop string or stop token id that ended it; ``None`` for end of sequence.
        chat: the text, read, in outputs of :meth:`LLM.chat`.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    chat: ChatAnswer | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request, seconds of ``time.monotonic()``; ``None`` until it happened.

    Attributes:
        arrival_time: the request was submitted.
        first_scheduled_time: its first token was computed.
        first_token_time: its first output token was known.
        finished_time: its last answer ended.
        num_preemptions: how often it lost its blocks.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's answers, finished or on their way.

    Attributes:
        prompt: the prompt's text, ``None`` if it came as token ids.
        outputs: one entry per answer; in a delta stream only those with something new.
        num_cached_tokens: prompt tokens whose keys and values were already in the cache.
        prompt_logprobs: one entry per prompt token, the first ``None``.
        finished: no more outputs will follow.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts at one moment; tokens, blocks and bytes as named.

    Attributes:
        num_blocks: blocks that the budget allows, the null block included: what the pool may hold.
        free_blocks: of those, blocks no request holds; ``cached_blocks`` of them can still be hit.
        cached_blocks: free blocks that carry a published prefix.
        used_blocks: blocks held by requests.
        prefix_queries: prompt tokens looked up in the prefix cache.
        prefix_hits: of those, tokens found.
        pool_bytes: size of the KV arrays now.
        pool_budget_bytes: what they may grow to.
        pool_growths: times that the pool grew.
        pool_shrinks: times that it gave memory back.
        pool_growths_refused: times that it should have grown and there was no memory: requests were
            preempted instead.
    """

    num_blocks: int
    block_size: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    running: int
    waiting: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    pool_bytes: int
    steps: int
    pool_budget_bytes: int = 0
    pool_growths: int = 0
    pool_shrinks: int = 0
    pool_growths_refused: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory goes; bytes.

    Attributes:
        total: free memory with that of the weights, as limited by ``limited_by``.
        activations: what a full step takes beside the pool, from one measured at load.
        copies: most that copies of contexts take beside the pool (on a CPU).
        left: what remains of all this, for the pool and whatever else the machine runs.
    """

    limited_by: str
    total: int
    weights: int
    activations: int
    copies: int

    @property
    def left(self) -> int:
        return self.total - self.weights - self.activations - self.copies


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What was loaded and how it will run, fixed at start.

    Attributes:
        model: the name requests use.
        backend: ``"metal"``, ``"cuda"`` or ``"cpu"``.
        forward: how a step is run: ``"packed rows"``, ``"row layout"`` or ``"dense gather"``.
        num_blocks: blocks that the budget allows, the null block included.
        start_blocks: of those, as many as the pool begins with; 0: all of them, and it stays so.
        bytes_per_token: KV bytes of one token over all layers.
        bytes_beyond_windows: KV bytes that are kept of a token that lies behind all windows; all of them
            if the model has no windows, or if what lies behind them is kept.
        pool_bytes: size of the KV arrays with all blocks.
        memory: what the budget is part of; ``None`` if that is not known.
        full_length_requests: how many requests of ``max_model_len`` the pool holds at once.
        bytes_per_state: what recurrent layers keep of one sequence, whatever its length; 0 without any.
        windows: of the layer groups; ``None`` is a group that looks back on everything.
        num_states: slots for such states, those of running requests and snapshots of prefixes, and slot 0.
        eos_token_ids: ids that end an answer.
        notes: further lines for the start-up report.
    """

    model: str
    backend: str
    dtype: str
    forward: str
    vocab_size: int
    num_blocks: int
    block_size: int
    bytes_per_token: int
    pool_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    full_length_requests: float
    bytes_beyond_windows: int = 0
    windows: tuple[int | None, ...] = (None,)
    bytes_per_state: int = 0
    num_states: int = 0
    start_blocks: int = 0
    memory: MemoryPlan | None = None
    eos_token_ids: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def need(self) -> BlockNeed:
        """How many of the pool's blocks a sequence takes."""
        return BlockNeed(self.windows, self.block_size, self.max_num_batched_tokens)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence: what the pool holds, and at most ``max_model_len``."""
        return self.need.longest(self.num_blocks - 1, self.max_model_len)
