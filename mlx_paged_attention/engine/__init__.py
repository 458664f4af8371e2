"""The engine: requests in, outputs out, one step at a time."""
