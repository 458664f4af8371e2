"""The characters by which byte-level vocabularies write bytes, since GPT-2."""

_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = tuple(byte for byte in range(256) if byte not in _VISIBLE)

# Visible characters of Latin-1 stand for themselves; the other bytes have those from U+0100 on.
BYTE_OF_SYMBOL: dict[str, int] = {chr(byte): byte for byte in _VISIBLE} | {
    chr(0x100 + number): byte for number, byte in enumerate(_HIDDEN)
}
