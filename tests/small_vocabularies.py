"""Small tokenizers made in code, with every byte in their vocabulary."""

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

BYTE_FALLBACK_WORDS = ("▁", "a", "▁a", "▁foo", "é", "€")


def byte_symbols() -> list[str]:
    """The visible character that byte-level BPE writes for each byte, by byte value (GPT-2's table)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]


def byte_level(*pieces: bytes, special: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    """Byte-level BPE: ids 0-255 are the bytes, then ``pieces`` (never merged to), then special tokens."""
    symbols = byte_symbols()
    vocab = {symbol: byte for byte, symbol in enumerate(symbols)}
    for piece in pieces:
        vocab.setdefault("".join(symbols[byte] for byte in piece), len(vocab))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def piece_ids(tokenizer: tokenizers.Tokenizer, pieces: list[bytes]) -> list[int]:
    """The ids of pieces given to :func:`byte_level`."""
    symbols = byte_symbols()
    ids = [tokenizer.token_to_id("".join(symbols[byte] for byte in piece)) for piece in pieces]
    assert None not in ids
    return ids


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama-2-like: id 1 + b is byte b, then BYTE_FALLBACK_WORDS; the first token loses its leading space."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    vocab |= {word: 257 + index for index, word in enumerate(BYTE_FALLBACK_WORDS)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer
