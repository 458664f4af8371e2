"""Tokenizer: text to token ids and back, and conversations to prompts."""

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from mlx_paged_attention.errors import InvalidRequestError, ModelLoadError
from mlx_paged_attention.text.answer_format import AnswerFormat, find_format
from mlx_paged_attention.text.byte_symbols import BYTE_OF_SYMBOL
from mlx_paged_attention.text.chat_template import ChatTemplate
from mlx_paged_attention.text.continuation import render_unfinished
from mlx_paged_attention.text.detokenizer import REPLACEMENT, Detokenizer
from mlx_paged_attention.text.gguf_vocabulary import gguf_adds_bos, gguf_value, tokenizer_from_gguf
from mlx_paged_attention.text.grammar import Grammars
from mlx_paged_attention.text.messages import map_strings, normalize_messages
from mlx_paged_attention.text.tokenizer_files import TokenizerFiles

# One text is encoded at a time, so that the library's threads have nothing to do; without them it does not
# warn about every process that is started later.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """A model's vocabulary, special tokens and chat template. Immutable; any thread may use it.

    Attributes:
        added_tokens: ids of control tokens and of others that stand for themselves, by text.
        chat_template: the model's, or ``None``.
        bos_token_id: beginning of sequence, or ``None``.
        eos_token_ids: every id that ends an answer, the tokenizer's own first.
        grammars: what restricts answers to a form.
        special_ids: control tokens: left out of decoded text, never read from a user's message.
        vocab_size: number of ids, added tokens included. A model may have more rows than that.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self._backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.chat_template = chat_template
        self.grammars = Grammars(backend, self.eos_token_ids)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._special_tokens = {token_id: token.content for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(self._special_tokens)
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self._byte_fallback = backend.token_to_id("<0x0A>") is not None

    @classmethod
    def from_directory(cls, path: Path) -> "Tokenizer":
        """Load from a Hugging Face or MLX model directory; never runs code from it.

        Raises:
            ModelLoadError: a file is missing or damaged.
        """
        files = TokenizerFiles.read(path)
        backend = files.backend

        def id_of(name: str) -> int | None:
            return backend.token_to_id(files.special_tokens[name]) if name in files.special_tokens else None

        bos, eos = id_of("bos_token"), id_of("eos_token")
        if bos is not None and files.add_bos_token is not None:
            _set_bos(backend, bos, files.add_bos_token)
        template = ChatTemplate(files.chat_templates, files.special_tokens) if files.chat_templates else None
        eos_ids = ([] if eos is None else [eos]) + files.eos_token_ids
        return cls(backend, bos_token_id=bos, eos_token_ids=eos_ids, chat_template=template)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Load from the metadata of a GGUF file, keys as in the file.

        Raises:
            ModelLoadError: the file has no vocabulary, or one of a kind that cannot be read from a GGUF.
        """
        backend = tokenizer_from_gguf(metadata)

        def id_of(name: str) -> int | None:
            value = metadata.get(f"tokenizer.ggml.{name}_token_id")
            return None if value is None else int(value)

        names = {"bos_token": id_of("bos"), "eos_token": id_of("eos"), "pad_token": id_of("padding")}
        tokens = gguf_value(metadata, "tokens")
        for name, token_id in names.items():
            if token_id is not None and not 0 <= token_id < len(tokens):
                raise ModelLoadError(f"the GGUF's {name} has id {token_id}, beyond its {len(tokens)} tokens")
        texts = {name: str(tokens[token_id]) for name, token_id in names.items() if token_id is not None}
        bos = names["bos_token"]
        if bos is not None:
            _set_bos(backend, bos, gguf_adds_bos(metadata))
        source = metadata.get("tokenizer.chat_template")
        eos_ids = [token_id for token_id in (names["eos_token"], id_of("eot")) if token_id is not None]
        template = ChatTemplate(str(source), texts) if source else None
        return cls(backend, bos_token_id=bos, eos_token_ids=eos_ids, chat_template=template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it are read as such.

        Args:
            text: anything, ``""`` included.
            add_special_tokens: also add those a bare prompt begins with (often one bos token, or none).
        """
        return _ids(self._backend, text, add_special_tokens=add_special_tokens)

    def encode_chat(self, rendered: str) -> list[int]:
        """Token ids of a rendered conversation: nothing is added, the template has written it all."""
        return self.encode(rendered, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids: what a :meth:`detokenizer` without stop strings makes of them."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        if self._byte_fallback and REPLACEMENT in text:
            # The library spoils the valid characters of a run of byte tokens if one byte of it is invalid. A
            # stream has shown them by then, and a complete answer must read like a streamed one.
            stream = self.detokenizer(skip_special_tokens=skip_special_tokens)
            text = "".join(map(stream.push, ids)) + stream.flush()
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one token as it reads inside a text, its leading space included; special tokens too."""
        text = self.decode([token_id], skip_special_tokens=False)
        if REPLACEMENT in text:
            return text
        # Decoders of SentencePiece vocabularies strip a leading space from the first token only.
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(text) :]

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 of :meth:`token_text`, or the bytes of a token that is only a part of a character."""
        text, piece = self.token_text(token_id), self.piece(token_id)
        if REPLACEMENT in text:
            if self._byte_fallback and (byte := re.fullmatch("<0x([0-9A-F]{2})>", piece)):
                return bytes.fromhex(byte[1])
            if all(symbol in BYTE_OF_SYMBOL for symbol in piece):
                return bytes(BYTE_OF_SYMBOL[symbol] for symbol in piece)
        return text.encode()

    @cached_property
    def fragments(self) -> dict[int, bytes]:
        """Bytes of the tokens that are only parts of characters, by id; found once, in half a second."""
        return {
            token_id: self.token_bytes(token_id)
            for piece, token_id in self._backend.get_vocab(with_added_tokens=False).items()
            if self._may_be_fragment(piece) and REPLACEMENT in self.token_text(token_id)
        }

    def _may_be_fragment(self, piece: str) -> bool:
        """Whether a closer look is worth its while: it is at few pieces only."""
        if self._byte_fallback or piece.isascii():
            return piece.startswith("<0x")
        try:
            bytes(BYTE_OF_SYMBOL[symbol] for symbol in piece).decode()
        except (KeyError, UnicodeDecodeError) as error:
            return isinstance(error, UnicodeDecodeError)
        return False

    def piece(self, token_id: int) -> str:
        """The vocabulary's own entry, a space in it perhaps written as another character; ``""`` if none."""
        return self._backend.id_to_token(token_id) or ""

    def detokenizer(
        self,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown_special_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> Detokenizer:
        """A fresh :class:`Detokenizer` for one sequence.

        Args:
            skip_special_tokens: if not, those that end an answer are skipped all the same.
            shown_special_ids: are not skipped.
        """
        backend = self._backend
        skips_all = skip_special_tokens and not shown_special_ids

        def decode(ids: list[int]) -> str:
            return backend.decode(ids, skip_special_tokens=skips_all)

        return Detokenizer(
            decode,
            stop=stop,
            include_stop=include_stop,
            min_tokens=min_tokens,
            silent_ids=self.special_ids.difference(shown_special_ids)
            if skip_special_tokens
            else self.special_ids.intersection(self.eos_token_ids),
        )

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """How the model marks reasoning and tool calls, as its template and vocabulary tell."""
        template = self.chat_template
        return find_format(
            "" if template is None else "\n".join(template.sources.values()),
            self._backend.get_vocab(with_added_tokens=True),
            offers_tools=self.template_reads("tools"),
        )

    def template_reads(self, variable: str) -> bool:
        """Whether the chat template looks at a variable."""
        return self.chat_template is not None and variable in self.chat_template.variables

    def answer_special_ids(self, *, tools: bool) -> tuple[int, ...]:
        """Control tokens that an answer's text must keep for its format to be read."""
        return tuple(
            token_id
            for token_id, text in sorted(self._special_tokens.items())
            if token_id not in self.eos_token_ids and self.answer_format.shows(text, tools=tools)
        )

    def bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Token sequences of each word, as at the start of a text and as after a space, each once."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip(" ")
            for text in (bare, f" {bare}"):
                ids = tuple(self.encode(text, add_special_tokens=False))
                if ids:
                    found[ids] = None
        return [list(ids) for ids in found]

    def render_chat(
        self,
        messages: Any,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            tools: function definitions offered to the model.
            add_generation_prompt: end with the opening of the assistant's turn; by default, unless the final
                message is continued.
            continue_final_message: end inside the last message, for the model to go on with it.
            variables: of the template.

        Raises:
            InvalidRequestError: malformed messages, or the template refuses them, or there is no template.
        """
        add = _adds_generation_prompt(add_generation_prompt, continue_final_message)
        options = {"tools": tools, "add_generation_prompt": add, **variables}
        return self._render(normalize_messages(messages), options, unfinished=continue_final_message)

    def chat_token_ids(
        self,
        messages: Any,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        """The prompt's token ids of a conversation; arguments as for :meth:`render_chat`.

        Equal to ``encode_chat(render_chat(...))``, except that control tokens written out in a message,
        a tool result, a tool description or a template variable are encoded as the text they are: nobody can
        end their own turn.

        Raises:
            InvalidRequestError: as :meth:`render_chat`.
        """
        add = _adds_generation_prompt(add_generation_prompt, continue_final_message)
        guard = _SpecialTextGuard(list(self._special_tokens.values()))
        messages = [
            {**map_strings(message, guard.hide), "role": message["role"]}
            for message in normalize_messages(messages)
        ]
        options = {"tools": tools, "add_generation_prompt": add, **variables}
        options = {name: map_strings(value, guard.hide) for name, value in options.items()}
        text = self._render(messages, options, unfinished=continue_final_message)
        if not guard.used:
            return self.encode_chat(text)
        private = {text: _private_name(token_id) for token_id, text in self._special_tokens.items()}
        text = guard.restore(guard.special_text.sub(lambda match: private[match[0]], text))
        return _ids(self._private_backend, text, add_special_tokens=False)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, unfinished: bool
    ) -> str:
        template = self._template()

        def render(conversation: Sequence[Mapping[str, Any]]) -> str:
            return template.render(conversation, **options)

        return render_unfinished(render, messages) if unfinished else render(messages)

    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template: send a plain prompt to generate or /v1/completions",
                "messages",
            )
        return self.chat_template

    @cached_property
    def _private_backend(self) -> tokenizers.Tokenizer:
        """The same tokenizer with its special tokens renamed to texts that nobody writes.

        So special tokens and their look-alikes in messages are told apart within one encoding, and whatever
        happens around special tokens (stripped spaces, first-word rules) stays as it is.
        """
        names = {text: _private_name(token_id) for token_id, text in self._special_tokens.items()}
        data = json.loads(self._backend.to_str())
        for token in data["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = data["model"]
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            model["vocab"] = {names.get(text, text): token_id for text, token_id in vocab.items()}
        else:  # Unigram: a list of [text, score].
            model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        data["post_processor"] = None
        private = tokenizers.Tokenizer.from_str(json.dumps(data))
        for token_id in self._special_tokens:
            assert private.token_to_id(_private_name(token_id)) == token_id, "renaming moved a special token"
        return private


class _SpecialTextGuard:
    """Hides special-token texts in a request's strings behind placeholders that pass through a template.

    Placeholders are letters and digits with a random part, so that no template function alters them and no
    client can guess them.
    """

    def __init__(self, special_texts: list[str]) -> None:
        ordered = sorted(special_texts, key=len, reverse=True)
        self.special_text = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._key = secrets.token_hex(16)
        self._hidden: list[str] = []

    @property
    def used(self) -> bool:
        """Whether anything was hidden."""
        return bool(self._hidden)

    def hide(self, text: str) -> str:
        return self.special_text.sub(self._placeholder, text)

    def restore(self, text: str) -> str:
        return re.sub(f"z{self._key}z([0-9]+)z", lambda match: self._hidden[int(match[1])], text)

    def _placeholder(self, match: re.Match[str]) -> str:
        self._hidden.append(match[0])
        return f"z{self._key}z{len(self._hidden) - 1}z"


def _adds_generation_prompt(asked: bool | None, continues: bool) -> bool:
    if asked and continues:
        raise InvalidRequestError(
            "add_generation_prompt begins a new turn, continue_final_message goes on with the last one: "
            "ask for one of them",
            "continue_final_message",
        )
    return not continues if asked is None else asked


def _ids(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """As ``backend.encode``, which would keep all other threads waiting: a second per megabyte."""
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def _private_name(token_id: int) -> str:
    return f"\U000f0000{token_id}\U000f0001"


def _set_bos(backend: tokenizers.Tokenizer, bos: int, wanted: bool) -> None:
    """Make bare prompts begin with the bos token, or not."""
    if (backend.encode("").ids[:1] == [bos]) == wanted:
        return
    token = backend.id_to_token(bos)
    if wanted:
        backend.post_processor = processors.TemplateProcessing(
            single=[token, "$A"], special_tokens=[(token, bos)]
        )
    else:
        backend.post_processor = None
