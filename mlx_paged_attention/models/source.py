"""From what a person calls a model to files on this machine, checked as far as possible without MLX."""

import ast
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mlx_paged_attention.errors import ModelLoadError, UnsupportedModelError
from mlx_paged_attention.models.adapter import check_adapter
from mlx_paged_attention.models.default_model import DEFAULT_MODEL_NAME, fetch_default_model
from mlx_paged_attention.models.gguf_header import LOADABLE_TYPES, GGUFHeader, read_gguf_header
from mlx_paged_attention.models.safetensors_files import INDEX, check_weight_files

# What a model needs to run; Python files and pickled weights are never fetched.
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)
ASSUMED_CONTEXT = 4096  # tokens, where a configuration states none


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's files.

    Attributes:
        kind: ``"directory"`` (``config.json`` and safetensors) or ``"gguf"``.
        path: the directory, or the ``.gguf`` file.
        name: what requests call the model: repo id, directory name or file name without ``.gguf``.
        adapter: directory of an adapter to be added to the weights.
        progress: whether loading shows a progress bar (on stderr, if that is a terminal).
    """

    kind: Literal["directory", "gguf"]
    path: Path
    name: str
    adapter: Path | None = None
    progress: bool = field(default=False, compare=False)


def resolve(model: str | None, *, adapter: str | None = None, progress: bool = True) -> ModelSource:
    """Find or fetch a model, and check that its files are whole.

    Args:
        model: a directory, a ``.gguf`` file, a Hugging Face repo id; ``None`` or ``""`` is the
            default model.
        adapter: directory of an adapter in mlx-lm's format.
        progress: show progress bars (on stderr) while fetching and loading.

    Raises:
        ModelLoadError: it cannot be found or fetched, or its files are incomplete.
        UnsupportedModelError: its architecture is unknown, it wants to run its own Python, or has
            a number format that cannot be loaded.
    """
    adapter_path = Path(adapter).expanduser() if adapter else None
    if adapter_path is not None:
        check_adapter(adapter_path)
    if not model:
        source = ModelSource("gguf", fetch_default_model(progress=progress), DEFAULT_MODEL_NAME)
    else:
        source = _named(model, progress)
    if source.kind == "gguf":
        checked_gguf_header(source.path)
    else:
        check_directory(source.path)
    return replace(source, adapter=adapter_path, progress=progress)


def _named(model: str, progress: bool) -> ModelSource:
    try:
        path = Path(model).expanduser()
    except RuntimeError:  # "~nobody": a home that does not exist
        path = Path(model)
    if path.is_dir():
        return ModelSource("directory", path, path.resolve().name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelLoadError(f"{model} is a file but not a .gguf file; give the directory it lies in")
        return ModelSource("gguf", path, path.stem)
    if path.suffix.lower() == ".gguf":
        raise ModelLoadError(f"there is no file {model}")
    if model.startswith(("/", ".", "~")) or model.endswith("/") or model.count("/") > 1:
        raise ModelLoadError(
            f"{model} does not exist; give a directory, a .gguf file or a Hugging Face repo id"
        )
    if not _REPO_ID.fullmatch(model):
        raise ModelLoadError(f"{model!r} is neither a directory, a .gguf file nor a Hugging Face repo id")
    return ModelSource("directory", _download(model, progress), model)


def _download(repo: str, progress: bool) -> Path:
    import huggingface_hub  # takes half a second to import: only those who fetch pay for it
    from huggingface_hub import errors
    from tqdm.auto import tqdm

    class Silent(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    try:
        path = huggingface_hub.snapshot_download(
            repo, allow_patterns=_HUB_PATTERNS, tqdm_class=None if progress else Silent
        )
    except errors.GatedRepoError as error:
        raise ModelLoadError(
            f"{repo} is gated: accept its terms at https://huggingface.co/{repo} "
            "and log in with 'hf auth login'"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"there is no directory {repo} here and no such repo on Hugging Face "
            "(or it is private: 'hf auth login')"
        ) from error
    except errors.HFValidationError as error:
        raise ModelLoadError(f"{repo!r} is neither a directory here nor a Hugging Face repo id") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"cannot reach Hugging Face to fetch {repo}, and it is not in the local cache: "
            "check the network, or give a directory or .gguf file"
        ) from error
    except Exception as error:  # the client lets many kinds through: HTTP, TLS, disk full
        raise ModelLoadError(f"cannot fetch {repo} from Hugging Face: {_one_line(error)}") from error
    return Path(path)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def check_directory(path: Path) -> None:
    """Raise ``ModelLoadError`` unless ``path`` holds a configuration and complete safetensors files."""
    config = read_json(path / "config.json")
    if (model_file := config.get("model_file")) is not None:
        raise UnsupportedModelError(
            f"{path} wants to run its own Python ({model_file}); only architectures of mlx-lm are run"
        )
    if "model_type" not in config:
        raise ModelLoadError(f"{path / 'config.json'} names no model_type")
    if not _is_known(model_type := config["model_type"]):
        raise UnsupportedModelError(f"{path}: the installed mlx-lm does not know model type {model_type!r}")
    index = path / INDEX
    check_weight_files(path, read_json(index) if index.is_file() else None)


def _is_known(model_type: Any) -> bool:
    """Whether mlx-lm has the architecture, read off its files: importing it would start MLX."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or spec.origin is None:
        return True  # not installed: whoever loads the model finds out
    home = Path(spec.origin).parent
    if f"{model_type}.py" in {path.name for path in (home / "models").iterdir()}:
        return True
    others = _other_names((home / "utils.py").read_text(encoding="utf-8"))
    return not others or model_type in others


def _other_names(program: str) -> list[str]:
    """The keys of mlx-lm's tables ``{"mistral": "llama"}`` and ``{("name", "architecture"): "module"}``.

    Empty if there are no such tables any more.
    """
    names = []
    for node in ast.parse(program).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_REMAPPING"):
            keys = node.value.keys if isinstance(node.value, ast.Dict) else []
            names += [key.elts[0] if isinstance(key, ast.Tuple) else key for key in keys]
    return [name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str)]


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest context that a ``config.json`` states, in tokens."""
    for holder in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            if isinstance(length := holder.get(key), int) and length > 0:
                return length
    return None


def stated_context(source: ModelSource) -> int | None:
    """The longest context that a model's files state, in tokens; read without loading it."""
    if source.kind == "directory":
        return context_length(read_json(source.path / "config.json"))
    metadata = read_gguf_header(source.path).metadata
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return length if isinstance(length, int) and length > 0 else None


def checked_gguf_header(path: Path) -> GGUFHeader:
    """The header of a GGUF file whose tensors are complete and can all be loaded.

    Raises:
        ModelLoadError: the file is damaged or cut short.
        UnsupportedModelError: a tensor has a type that cannot be loaded.
    """
    header = read_gguf_header(path)
    refused = sorted({tensor.type for tensor in header.tensors if tensor.nbytes is None})
    if refused:
        raise UnsupportedModelError(
            f"{path} has tensors of type {', '.join(refused)}; "
            f"these can be loaded: {', '.join(LOADABLE_TYPES)}"
        )
    end = max((tensor.offset + (tensor.nbytes or 0) for tensor in header.tensors), default=0)
    if end == 0:
        raise ModelLoadError(f"{path} holds no tensors")
    if end > header.file_size:
        raise ModelLoadError(
            f"{path} is cut short: its tensors end at byte {end}, the file at {header.file_size}; "
            "download it again"
        )
    return header


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a model directory's file, or ``ModelLoadError``."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent} has no {path.name}: it is not a model directory") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return value
