"""A script that reads grammars from its standard input and answers what is wrong with each.

Run by :class:`GrammarChecker` in a process of its own, which may be killed. The first line holds the texts of
the model's special tokens, each further one a grammar, all as JSON; the answers are lines of JSON, too.
Tokens are single bytes here: what a grammar costs to compile hardly depends on the vocabulary.
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

    def __init__(self, special: list[str]) -> None:
        names = [name.encode() for name in dict.fromkeys(["<end of sequence>", *special])]
        self.tokens = [bytes([byte]) for byte in range(256)] + names
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = 256
        self.bos_token_id = None
        self.unk_token_id = None

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def main() -> None:
    """Answer until the input ends."""
    with suppress(ValueError, OSError):  # the machine's own limit is lower
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    vocabulary = ByteVocabulary(json.loads(sys.stdin.readline()))
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=[256])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        source, limits = json.loads(line)
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**limits))
        if not matcher.is_error():
            matcher.compute_bitmask()
        print(json.dumps(matcher.get_error()), flush=True)


if __name__ == "__main__":
    main()
