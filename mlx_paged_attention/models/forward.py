"""ForwardContext: what the seam's parts share during one forward pass."""

from dataclasses import dataclass

import mlx.core as mx

from mlx_paged_attention.ops.batch import AttentionBatch


@dataclass
class ForwardContext:
    """Set by the runner before it calls the model, read by layer caches and the output head.

    Attributes:
        batch: where this forward's rows read and write; ``None`` between forwards.
        selected: int32 indices into the flattened ``[rows * queries]`` tokens whose logits are
            wanted; ``None`` computes all.
        head_selected: the head has picked them; if not, whoever has its output must.
    """

    batch: AttentionBatch | None = None
    selected: mx.array | None = None
    head_selected: bool = False

    def current(self) -> AttentionBatch:
        assert self.batch is not None, "a layer cache was used outside a forward pass"
        return self.batch
