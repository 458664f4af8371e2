"""One array of block tables: lines are reused, and grow in both directions."""

import numpy as np

from mlx_paged_attention.runner.block_tables import BlockTables


def test_tables_are_those_of_their_requests_however_many_and_long():
    rng = np.random.default_rng(0)
    tables, expected = BlockTables(), {}
    for step in range(300):
        if len(expected) < 2 or rng.random() < 0.3:
            name = f"r{step}"
            tables.add(name)
            expected[name] = []
        names = list(expected)
        name = names[rng.integers(len(names))]
        if rng.random() < 0.2:
            tables.remove(name)
            del expected[name]
        else:
            blocks = rng.integers(1, 10**6, rng.integers(0, 30)).tolist()
            tables.extend(name, blocks)
            expected[name] += blocks
        for name, blocks in expected.items():
            (line,) = tables.of([name], len(blocks) + 3)
            assert line.tolist()[: len(blocks)] == blocks
            assert not line[len(blocks) :].any()
    width = max(map(len, expected.values()))
    assert len(expected) > 16
    assert width > 64
    lines = tables.of(list(expected), width)
    assert lines.shape == (len(expected), width)
    for line, blocks in zip(lines, expected.values(), strict=True):
        assert line.tolist() == blocks + [0] * (width - len(blocks))


def test_forgetting_what_is_not_there_is_nothing():
    tables = BlockTables()
    tables.remove("never added")
    tables.add("a")
    tables.remove("a")
    tables.remove("a")
    tables.add("b")
    tables.add("c")
    tables.extend("b", [7])
    assert tables.of(["c"], 1).tolist() == [[0]]
