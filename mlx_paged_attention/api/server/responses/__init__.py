"""OpenAI's Responses API: requests, items, events, and the store of responses that can be gone on from."""
