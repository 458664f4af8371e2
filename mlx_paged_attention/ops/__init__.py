"""Attention over paged keys and values: one interface, a plain reference, one path per backend."""
