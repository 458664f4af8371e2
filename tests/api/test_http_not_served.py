"""Paths where clients of other servers look for something."""

import httpx
import pytest
from fake_llm import FakeLLM
from test_http_server import connect, error_of

from mlx_paged_attention.api.server.not_served import _NOT_SERVED


@pytest.mark.parametrize("path", sorted(_NOT_SERVED))
async def test_what_is_served_elsewhere_is_a_404_that_says_what_to_do(
    client: httpx.AsyncClient, path: str
) -> None:
    for method, below in (("GET", ""), ("POST", "/x"), ("DELETE", "/x/y")):
        response = await client.request(method, path + below)
        assert response.status_code == 404
        error = error_of(response)
        assert (error["type"], error["code"]) == ("invalid_request_error", "not_served")
        assert error["message"].startswith(f"{path} is not served: ")


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/embeddingss", "/apiary", "/%F0%9F%98%80"])
async def test_any_other_path_is_a_404_that_says_where_to_look(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(path)
    assert response.status_code == 404
    assert error_of(response)["message"].endswith("GET / lists what is here")


@pytest.mark.parametrize(
    ("path", "right", "what_to_do"),
    [
        ("/chat/completions", "/v1/chat/completions", "put /v1 at the end"),
        ("/models", "/v1/models", "put /v1 at the end"),
        ("/responses/resp_1", "/v1/responses/resp_1", "put /v1 at the end"),
        ("/v1/v1/messages", "/v1/messages", "leave out /v1 at the end"),
        ("/v1/v1/chat/completions", "/v1/chat/completions", "leave out /v1 at the end"),
    ],
)
async def test_a_base_url_without_its_v1_or_with_two_is_told(
    client: httpx.AsyncClient, path: str, right: str, what_to_do: str
) -> None:
    response = await client.post(path, json={})
    assert (response.status_code, error_of(response)["code"]) == (404, "not_served")
    assert f"nothing at {path}, but at {right}: {what_to_do}" in error_of(response)["message"]


async def test_another_method_is_told_which_one_is_right(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert error_of(response)["message"] == "/v1/completions takes POST, not GET"


async def test_whoever_has_no_key_is_told_nothing() -> None:
    async with connect(FakeLLM(), api_keys=["k"]) as client:
        assert (await client.post("/v1/embeddings", json={})).status_code == 401
