"""Anthropic's Messages API: requests, their translation onto chat requests, events."""
