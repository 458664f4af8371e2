"""``python -m mlx_paged_attention``: the same as the command ``mlx-paged``."""

from mlx_paged_attention.api.cli import main

if __name__ == "__main__":
    main()
