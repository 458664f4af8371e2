"""ModelInspection: what each layer of a model keeps, and how the engine runs it."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from mlx_paged_attention.cache.block_need import BlockNeed
from mlx_paged_attention.models.cache_spec import CacheEntry, ModelCacheSpec
from mlx_paged_attention.runner.grouping import Grouping

GIB = 1 << 30


@dataclass(frozen=True)
class LayerInspection:
    """One entry of a model's cache.

    Attributes:
        kind: such as ``"sliding window of 512"``.
        shape: such as ``"8 heads, keys 128, values 128"``.
        bytes_per_token: of keys and values.
        bytes_per_sequence: of states.
    """

    kind: str
    shape: str
    bytes_per_token: int = 0
    bytes_per_sequence: int = 0


@dataclass(frozen=True)
class ModelInspection:
    """How a model runs.

    Attributes:
        max_model_len: the longest context that the model was made for.
        forward: the layout that is exact for it; ``None`` if it is refused.
        refusal: why.
        layers: what it keeps, as far as that was found out.
        need: of blocks, of ``bytes_per_block`` each, if what lies behind windows is freed.
        bytes_beyond_windows: kept of a token that lies behind all windows.
        windows_kept: why nothing behind windows is freed; ``None`` if it is, or if there are none.
    """

    model: str
    backend: str
    dtype: str
    max_model_len: int
    forward: str | None = None
    refusal: str | None = None
    layers: tuple[LayerInspection, ...] = ()
    need: BlockNeed | None = None
    bytes_per_block: int = 0
    bytes_beyond_windows: int = 0
    windows_kept: str | None = None

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_per_sequence(self) -> int:
        """Of states, whatever the sequence's length."""
        return sum(layer.bytes_per_sequence for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of the layer groups."""
        return (None,) if self.need is None else self.need.windows

    @property
    def tokens_per_gib(self) -> int | None:
        """The longest context that a GiB holds; ``None`` if length costs nothing."""
        if not self.bytes_per_token:
            return None
        if self.need is None:
            return max(0, GIB - self.bytes_per_sequence) // self.bytes_per_token
        blocks = GIB // self.bytes_per_block
        limit = blocks * self.need.block_size
        tokens = self.need.longest(blocks, limit)
        return None if None not in self.windows and tokens == limit else tokens

    def with_layers(self, spec: ModelCacheSpec) -> "ModelInspection":
        return replace(self, layers=tuple(_layer(entry, spec) for entry in spec.entries))

    def with_groups(self, spec: ModelCacheSpec, grouping: Grouping, *, step_tokens: int) -> "ModelInspection":
        """With what is freed behind windows, in steps of at most ``step_tokens`` tokens."""
        groups = grouping.groups
        windows = [group.window for group in groups]
        if set(windows) == {None}:
            return replace(self, windows_kept=grouping.windows_kept)
        return replace(
            self,
            need=BlockNeed(windows, spec.block_size, step_tokens),
            bytes_per_block=spec.bytes_per_block_of(groups),
            bytes_beyond_windows=spec.bytes_beyond_windows(groups),
        )

    def groups(self) -> list[tuple[int, LayerInspection]]:
        """Layers that are alike, and how many they are, in the order in which they first occur."""
        return [(count, layer) for layer, count in Counter(self.layers).items()]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "backend": self.backend,
            "dtype": self.dtype,
            "forward": self.forward,
            "refusal": self.refusal,
            "max_model_len": self.max_model_len,
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_sequence": self.bytes_per_sequence,
            "bytes_beyond_windows": self.bytes_beyond_windows,
            "tokens_per_gib": self.tokens_per_gib,
            "windows": list(self.windows),
            "windows_kept": self.windows_kept,
            "layers": [
                {
                    "kind": layer.kind,
                    "shape": layer.shape,
                    "bytes_per_token": layer.bytes_per_token,
                    "bytes_per_sequence": layer.bytes_per_sequence,
                }
                for layer in self.layers
            ],
        }


def _layer(entry: CacheEntry, spec: ModelCacheSpec) -> LayerInspection:
    match entry.kind:
        case "unused":
            return LayerInspection("keeps nothing", "")
        case "state":
            state = spec.states[entry.index]
            shapes = ", ".join(" x ".join(map(str, plane.shape)) for plane in state.planes)
            return LayerInspection("recurrent state", shapes, bytes_per_sequence=state.bytes_per_slot)
        case "attention":
            return _attention(entry.index, spec)
        case "list":
            parts = [_layer(part, spec) for part in entry.parts]
            return LayerInspection(
                " + ".join(part.kind for part in parts),
                " + ".join(part.shape for part in parts),
                sum(part.bytes_per_token for part in parts),
                sum(part.bytes_per_sequence for part in parts),
            )


def _attention(index: int, spec: ModelCacheSpec) -> LayerInspection:
    layer, kind = spec.layers[index], spec.kinds[index]
    keys, values = (plane.shape for plane in layer.planes)
    names = {
        "full": "full attention",
        "window": f"sliding window of {layer.window}",
        "chunked": "attention within chunks",
        "latent": "latent attention (MLA)",
        "own": "attention of the model's own",
    }
    heads = "1 head" if keys[0] == 1 else f"{keys[0]} heads"
    return LayerInspection(
        names[kind], f"{heads}, keys {keys[2]}, values {values[2]}", layer.bytes_per_block // spec.block_size
    )
