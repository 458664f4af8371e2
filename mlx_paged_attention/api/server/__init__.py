"""The OpenAI-compatible HTTP server: one file per API family, all of them on ``serving.py``."""
