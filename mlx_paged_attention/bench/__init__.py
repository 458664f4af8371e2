"""Benchmarks that can be believed: contestants in turns, in one process, with the spread of every number."""
