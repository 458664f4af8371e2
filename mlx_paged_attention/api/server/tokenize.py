"""``/tokenize``, ``/detokenize``, ``/tokenizer_info``: text to token ids and back, in vLLM's shapes."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from mlx_paged_attention.api.server.chunks import (
    TokenizedPrompt,
    TokenizerInfo,
    TokensText,
    encode,
)
from mlx_paged_attention.api.server.conversation import Conversation
from mlx_paged_attention.api.server.protocol import ChatRequest, ListOf
from mlx_paged_attention.api.server.serving import Serving
from mlx_paged_attention.errors import InvalidRequestError

router = APIRouter()


class TokenizeRequest(ChatRequest):
    """A text as ``prompt``, or a chat request as it would be sent to be answered.

    Fields of a chat request that do not change its prompt may come along, and have no effect here.
    """

    prompt: str | None = None
    messages: ListOf[dict[str, Any]] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_thing_to_tokenize(self) -> "TokenizeRequest":
        if (self.prompt is None) == ("messages" not in self.model_fields_set):
            raise InvalidRequestError("send a text as prompt or a conversation as messages", "prompt")
        if self.prompt is None and self.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens: the chat template writes those of a conversation; leave it out",
                "add_special_tokens",
            )
        return self


class DetokenizeRequest(BaseModel):
    """Token ids."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tokens: ListOf[int]


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a text or a conversation, and how many there may be."""
    serving: Serving = request.app.state.serving
    serving.model_name(body.model)
    tokenizer = serving.require_tokenizer()
    if body.prompt is None:
        ids = await Conversation(serving, body).prompt_token_ids()
    else:
        special = body.add_special_tokens is not False
        ids = await asyncio.to_thread(tokenizer.encode, body.prompt, add_special_tokens=special)
    answer = TokenizedPrompt(
        count=len(ids),
        max_model_len=serving.llm.info.max_model_len,
        tokens=ids,
        token_strs=[tokenizer.piece(token_id) for token_id in ids] if body.return_token_strs else None,
    )
    return Response(encode(answer), media_type="application/json")


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, control tokens included."""
    serving: Serving = request.app.state.serving
    serving.model_name(body.model)
    tokenizer = serving.require_tokenizer()
    vocab_size = serving.llm.info.vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"tokens has {token_id}; the vocabulary has ids 0 to {vocab_size - 1}"[:200], "tokens"
            )
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return Response(encode(TokensText(text)), media_type="application/json")


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """What begins and ends a text, and the chat template's source."""
    serving: Serving = request.app.state.serving
    tokenizer = serving.require_tokenizer()
    template, eos = tokenizer.chat_template, tokenizer.eos_token_ids
    answer = TokenizerInfo(
        bos_token=None if tokenizer.bos_token_id is None else tokenizer.piece(tokenizer.bos_token_id),
        eos_token=tokenizer.piece(eos[0]) if eos else None,
        chat_template=None if template is None else template.sources.get("default"),
    )
    return Response(encode(answer), media_type="application/json")
