import numpy as np

from flashtrain.data.random_tokens import RandomCorpus


def test_rows_follow_from_the_seed_and_the_index():
    row = RandomCorpus(50, seed=1).train.row(3, 1000)
    assert row.shape == (1001,) and set(row.tolist()) == set(range(50))
    assert np.array_equal(row, RandomCorpus(50, seed=1).train.row(3, 1000))
    others = [RandomCorpus(50, seed=2).train, RandomCorpus(50, seed=1).validation]
    assert not any(np.array_equal(row, other.row(3, 1000)) for other in others)
    assert not np.array_equal(row, RandomCorpus(50, seed=1).train.row(4, 1000))
