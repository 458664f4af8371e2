"""``/v1/chat/completions/render`` and ``/v1/completions/render``: what would be computed, without doing so.

Routers ask this for the token ids by which they choose a server. In vLLM's shape, and the prompt as text.
"""

import asyncio

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from mlx_paged_attention.api.server.chunks import RenderedRequest, encode
from mlx_paged_attention.api.server.completions import prompt_list, prompts_to_run
from mlx_paged_attention.api.server.conversation import Conversation
from mlx_paged_attention.api.server.protocol import ChatRequest, CompletionRequest
from mlx_paged_attention.api.server.serving import Serving, new_id, with_owner
from mlx_paged_attention.engine.prompt import check_token_ids, tokenize

router = APIRouter()


@router.post("/v1/chat/completions/render")
async def render_chat(body: ChatRequest, request: Request) -> Response:
    """What the chat template makes of the conversation, as text and as token ids."""
    serving: Serving = request.app.state.serving
    model = serving.model_name(body.model)
    rendered = await Conversation(serving, with_owner(body, request)).rendered()
    check_token_ids(rendered.token_ids, rendered.params, serving.llm.info.vocab_size)
    answer = RenderedRequest(
        request_id=new_id("chatcmpl"),
        model=model,
        prompt=rendered.text,
        token_ids=rendered.token_ids,
        sampling_params=msgspec.to_builtins(rendered.params),
        stream=bool(body.stream),
    )
    return Response(encode(answer), media_type="application/json")


@router.post("/v1/completions/render")
async def render_completion(body: CompletionRequest, request: Request) -> Response:
    """The token ids of each prompt."""
    serving: Serving = request.app.state.serving
    serving.require_engine()
    model = serving.model_name(body.model)
    params = with_owner(body, request).completion_params(serving.defaults)
    answers = []
    tokenizer = serving.llm.tokenizer
    for given, prompt in zip(prompt_list(body.prompt), await prompts_to_run(body, tokenizer), strict=True):
        _, token_ids = await asyncio.to_thread(tokenize, prompt, tokenizer)
        check_token_ids(token_ids, params, serving.llm.info.vocab_size)
        answers.append(
            RenderedRequest(
                request_id=new_id("cmpl"),
                model=model,
                prompt=given if isinstance(given, str) else None,
                token_ids=token_ids,
                sampling_params=msgspec.to_builtins(params),
                stream=bool(body.stream),
            )
        )
    return Response(encode(answers), media_type="application/json")
