import numpy as np

from mlx_paged_attention.sampling.random import uniform


def test_a_number_depends_on_its_seed_and_index_alone():
    seeds, indices = [5, -1, 2**63 - 1, 5, 0], [0, 3, 9, 1, 0]
    together = uniform(seeds, indices)
    alone = [uniform([seed], [index])[0] for seed, index in zip(seeds, indices, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == 5


def test_numbers_stay_the_same_from_release_to_release():
    assert uniform([0, 1, -1], [0, 1, 2]).tolist() == [
        0.8833107948303223,
        0.3723933696746826,
        0.31821584701538086,
    ]


def test_numbers_are_uniform_and_uncorrelated_along_both_axes():
    n = 400
    seeds, indices = np.divmod(np.arange(n * n), n)
    table = uniform(seeds.tolist(), indices.tolist()).reshape(n, n).astype(np.float64)
    assert table.min() >= 0.0
    assert table.max() < 1.0
    counts = np.histogram(table, bins=100, range=(0, 1))[0]
    assert ((counts - n * n / 100) ** 2 / (n * n / 100)).sum() < 160  # chi-square, 99 degrees: p ~ 1e-4
    for one, other in [(table[:, 1:], table[:, :-1]), (table[1:], table[:-1])]:
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.01
