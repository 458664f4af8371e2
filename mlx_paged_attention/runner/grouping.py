"""Which of a model's layers form groups of their own, so that blocks behind their windows are given back."""

from dataclasses import dataclass

from mlx_paged_attention.cache.layer_groups import LayerGroup, group_layers, one_group
from mlx_paged_attention.models.cache_spec import ModelCacheSpec
from mlx_paged_attention.runner.layout import Layout


@dataclass(frozen=True)
class Grouping:
    """A model's layer groups.

    Attributes:
        windows_kept: why what lies behind windows stays in memory, masked; ``None`` if it does not, or if
            there are no windows.
    """

    groups: tuple[LayerGroup, ...]
    windows_kept: str | None = None


def choose_groups(spec: ModelCacheSpec, layout: Layout) -> Grouping:
    """The layer groups in which a model runs in this layout."""
    windows = [layer.window for layer in spec.layers]
    if all(window is None for window in windows):
        return Grouping(one_group(len(windows)))
    reason = _obstacle(spec, layout)
    if reason is not None:
        return Grouping(one_group(len(windows)), reason)
    return Grouping(group_layers(windows))


def _obstacle(spec: ModelCacheSpec, layout: Layout) -> str | None:
    if layout.dense:
        return "the model attends by itself, to whole contexts"
    if spec.states:
        return "the model has recurrent layers, too"
    if not set(spec.kinds) <= {"full", "window"}:
        return "other layers attend in ways of their own"
    if len({layer.planes for layer in spec.layers}) > 1:
        return "layers differ in the shapes of keys and values"
    return None
