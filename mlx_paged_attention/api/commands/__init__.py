"""The commands of ``mlx-paged``, one file each."""
