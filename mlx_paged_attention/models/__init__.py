"""From a model's name to mlx-lm's module, prepared to run on the paged cache."""
