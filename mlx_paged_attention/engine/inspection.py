"""ModelInspection: what each layer of a model keeps, and how the engine runs it."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from mlx_paged_attention.models.cache_spec import CacheEntry, ModelCacheSpec

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
    """

    model: str
    backend: str
    dtype: str
    max_model_len: int
    forward: str | None = None
    refusal: str | None = None
    layers: tuple[LayerInspection, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_per_sequence(self) -> int:
        """Of states, whatever the sequence's length."""
        return sum(layer.bytes_per_sequence for layer in self.layers)

    @property
    def tokens_per_gib(self) -> int | None:
        """The longest context that a GiB holds; ``None`` if length costs nothing."""
        if not self.bytes_per_token:
            return None
        return max(0, GIB - self.bytes_per_sequence) // self.bytes_per_token

    def with_layers(self, spec: ModelCacheSpec) -> "ModelInspection":
        return replace(self, layers=tuple(_layer(entry, spec) for entry in spec.entries))

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
            "tokens_per_gib": self.tokens_per_gib,
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
