"""Which blocks hold whose keys and values: pure bookkeeping, without the arrays. Imports no MLX."""
