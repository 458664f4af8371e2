"""A script that reads grammars from its standard input and answers what is wrong with each.

Run by :class:`GrammarChecker` in a process of its own, which may be killed. The first line has ids and texts
of the model's special tokens, each further one a grammar, all as JSON; the answers are lines of JSON, too.
Other tokens are single bytes here: what a grammar costs to compile hardly depends on the vocabulary.
"""

import json
import resource
import sys
from contextlib import suppress
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# Of address space; not enforced by macOS.
MAX_BYTES = 2 << 30


class ByteVocabulary:
    """What :class:`TokenizerWrapper` wants to know of a tokenizer."""

    def __init__(self, special: dict[int, str]) -> None:
        ids = max(special, default=-1) + 258  # room for them, for all bytes and for an end
        free = [token_id for token_id in range(ids) if token_id not in special]
        self.tokens = [b""] * ids
        self._bytes = free[:256]
        for byte, token_id in enumerate(self._bytes):
            self.tokens[token_id] = bytes([byte])
        for token_id, name in special.items():
            self.tokens[token_id] = name.encode()
        self.eos_token_id = free[-1]
        self.tokens[self.eos_token_id] = b"<end of sequence>"
        self.special_token_ids = [*special, self.eos_token_id]
        self.bos_token_id = None
        self.unk_token_id = None

    def __call__(self, text: Any) -> list[int]:
        return [self._bytes[byte] for byte in (text if isinstance(text, bytes) else text.encode())]


def main() -> None:
    """Answer until the input ends."""
    with suppress(ValueError, OSError):  # the machine's own limit is lower
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    vocabulary = ByteVocabulary(dict(json.loads(sys.stdin.readline())))
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=[vocabulary.eos_token_id])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        source, limits = json.loads(line)
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**limits))
        if not matcher.is_error():
            matcher.compute_bitmask()
        print(json.dumps(matcher.get_error()), flush=True)


if __name__ == "__main__":
    main()
