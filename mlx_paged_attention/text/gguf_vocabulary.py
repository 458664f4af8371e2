"""A GGUF file's vocabulary as a ``tokenizers.Tokenizer``.

Keys and token types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (section "Tokenizer").
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mlx_paged_attention.errors import ModelLoadError

_CONTROL, _USER_DEFINED = 3, 4
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}NUMBERS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer described by the ``tokenizer.ggml.*`` keys of a GGUF file's metadata.

    Raises:
        ModelLoadError: the keys are missing or contradict each other, or the kind of vocabulary is not one of
            those supported.
    """
    kind = gguf_value(metadata, "model")
    if kind != "gpt2":
        raise ModelLoadError(
            f"this GGUF has a {kind!r} vocabulary; only byte-level BPE ('gpt2') can be read from a GGUF: "
            "use the model's Hugging Face or MLX directory, which brings a tokenizer.json"
        )
    tokens = [str(token) for token in gguf_value(metadata, "tokens")]
    merges = [_pair(str(merge)) for merge in gguf_value(metadata, "merges")]
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", [])] or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelLoadError(f"the GGUF lists {len(tokens)} tokens but {len(types)} token types")
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise ModelLoadError("the GGUF's vocabulary lists a token twice")
    pre = str(metadata.get("tokenizer.ggml.pre", "gpt-2"))
    try:
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # The library raises bare Exceptions.
        raise ModelLoadError(f"the GGUF's merges do not fit its tokens: {error}") from error
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    defined = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in defined])
    return tokenizer


def gguf_value(metadata: Mapping[str, Any], name: str) -> Any:
    """The value of ``tokenizer.ggml.<name>``; its absence is a ModelLoadError."""
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        raise ModelLoadError(f"the GGUF has no {key}, so it brings no tokenizer")
    return metadata[key]


def gguf_adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether prompts begin with the beginning-of-sequence token; Llama 3 files may leave it out."""
    default = metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _pair(merge: str) -> tuple[str, str]:
    # No byte-level token contains a space, so the first one separates the two.
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    numbers = {"qwen2": "", "llama-bpe": "{1,3}"}.get(pre)
    if numbers is None:
        raise ModelLoadError(
            f"this GGUF splits text the {pre!r} way; supported are gpt-2, llama-bpe, qwen2 and smollm: "
            "use the model's Hugging Face or MLX directory, which brings a tokenizer.json"
        )
    split = pre_tokenizers.Split(Regex(_SPLIT.replace("NUMBERS", numbers)), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
