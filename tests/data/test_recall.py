"""Associative recall: what a document says and asks, that rows follow from their index alone, what is scored."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flashtrain.data.datamodule import NOT_SCORED, StepDataModule
from flashtrain.data.options import RecallOptions
from flashtrain.data.order import rows_for_step
from flashtrain.data.recall import NUM_ROWS, RecallCorpus, RecallTokenizer
from flashtrain.errors import UserError

OPTIONS = RecallOptions(source="recall", num_keys=50, num_values=7, num_queries=4, seed=0)
PREFIX = 57
CORPUS = RecallCorpus(OPTIONS)


@pytest.mark.parametrize("length", [16, 30, 108], ids="length-{}".format)
def test_a_document_says_pairs_and_asks_for_some_of_them_once(length):
    for i in range(20):
        tokens, depths = CORPUS.validation.document(i, length)
        assert len(tokens) == length + 1 and tokens[0] == PREFIX
        pairs = tokens[1:].reshape(-1, 2)
        said, asked = pairs[:-4], pairs[-4:]
        assert len(said) == length // 2 - 4
        assert ((said[:, 0] >= 0) & (said[:, 0] < 50)).all() and len(set(said[:, 0].tolist())) == len(said)
        assert ((said[:, 1] >= 50) & (said[:, 1] < 57)).all()
        assert len(set(asked[:, 0].tolist())) == 4
        for pair, depth in zip(asked, depths, strict=True):
            (place,) = np.flatnonzero(said[:, 0] == pair[0])
            assert said[place].tolist() == pair.tolist()
            assert depth == np.float32(place / (len(said) - 1))


def test_a_row_to_train_on_has_few_pairs_or_many_and_asks_for_all():
    """At most 4 pairs of 28 are had by log 5 / log 29 of the rows; five standard deviations are allowed."""
    counts = []
    for i in range(2000):
        (tokens, _), scored = CORPUS.train.document(i, 64), CORPUS.train.scored(i, 64)
        num_pairs = scored.start // 2
        said, asked = np.split(tokens[1:].reshape(-1, 2), [num_pairs])
        assert len(set(said[:, 0].tolist())) == num_pairs and len(asked) >= 4
        assert {tuple(pair) for pair in asked.tolist()} <= {tuple(pair) for pair in said.tolist()}
        times = np.unique(asked[:, 0], return_counts=True)[1]
        assert times.max() - times.min() <= 1 and (len(times) == num_pairs or times.max() == 1)
        counts.append(num_pairs)
    assert set(counts) == set(range(1, 29))
    assert abs(sum(count <= 4 for count in counts) - 2000 * np.log(5) / np.log(29)) < 5 * (2000 / 4) ** 0.5


def test_a_row_is_a_function_of_seed_split_and_index():
    def rows(corpus, split="train"):
        return np.stack([getattr(corpus, split).row(i, 30) for i in range(50)])

    assert np.array_equal(rows(CORPUS), rows(RecallCorpus(OPTIONS)))
    others = [rows(CORPUS, "validation"), rows(RecallCorpus(replace(OPTIONS, seed=1)))]
    assert all((rows(CORPUS) != other).any(axis=1).all() for other in others)
    assert len(np.unique(rows(CORPUS, "validation"), axis=0)) == 50


def test_all_keys_and_values_are_drawn_alike():
    """Of 2,000 documents of 11 pairs; five standard deviations are allowed."""
    rows = np.stack([CORPUS.validation.row(i, 30) for i in range(2000)])
    pairs = rows[:, 1:23].reshape(-1, 2)
    for column, first, count in ((0, 0, 50), (1, 50, 7)):
        expected = len(pairs) / count
        seen = np.bincount(pairs[:, column] - first, minlength=count)
        assert len(seen) == count and abs(seen - expected).max() < 5 * expected**0.5


def data_module(num_workers=0):
    return StepDataModule(
        CORPUS,
        sequence_length=30,
        rows_per_step=6,
        num_steps=5,
        seed=3,
        validation_rows=8,
        validation_batch_rows=8,
        isolate_documents=False,
        num_workers=num_workers,
    )


class OneRank:
    """What the data module asks a Trainer."""

    global_rank, world_size = 0, 1

    class strategy:
        root_device = torch.device("cpu")


@pytest.mark.parametrize("num_workers", [0, 2], ids="{}-workers".format)
def test_steps_are_those_of_the_order_and_go_on_from_any(num_workers):
    data = data_module(num_workers)
    data.trainer = OneRank
    steps = list(data.train_dataloader())
    assert len(steps) == 5
    for step, batch in enumerate(steps):
        indices = rows_for_step(step, seed=3, rows_per_step=6, num_rows=NUM_ROWS)
        assert batch["rows"].tolist() == indices.tolist()
        expected = np.stack([CORPUS.train.row(i, 30) for i in indices])
        assert np.array_equal(batch["inputs"], expected[:, :-1])
    data.start_step = 3
    for batch, expected in zip(data.train_dataloader(), steps[3:], strict=True):
        assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_only_answers_are_scored():
    data = data_module()
    data.trainer = OneRank
    (batch,) = data.val_dataloader()
    scored = batch["labels"] != NOT_SCORED
    assert scored.sum(dim=1).tolist() == [4] * 8
    assert (batch["labels"][scored] >= 50).all() and (batch["inputs"][scored] < 50).all()
    assert batch["labels"][:, -1].tolist() == [CORPUS.validation.row(i, 30)[-1] for i in batch["rows"].tolist()]


def test_words_name_the_tokens():
    tokenizer = RecallTokenizer(OPTIONS)
    assert (tokenizer.vocab_size, tokenizer.prefix_id) == (58, PREFIX)
    assert tokenizer.encode("k0 k49 v0\nv6").tolist() == [0, 49, 50, 56]
    assert tokenizer.decode([0, 49, PREFIX, 50, 56, 60]) == " k0 k49 v0 v6"
    for text in ("k50", "v7", "k", "k01", "words", "K1"):
        with pytest.raises(UserError, match=f"{text} is no word of data=recall; those are k0 to k49 and v0 to v6"):
            tokenizer.encode(f"k1 {text}")
    assert not tokenizer.bytes_per_token.any()


def test_fingerprints_tell_what_rows_and_tokens_follow_from():
    others = [replace(OPTIONS, **{name: 9}) for name in ("num_keys", "num_values", "num_queries", "seed")]
    assert len({RecallCorpus(options).fingerprint for options in (OPTIONS, *others)}) == 5
    assert len({RecallTokenizer(options).fingerprint for options in (OPTIONS, *others)}) == 3


@pytest.mark.parametrize(
    ("length", "sentence"),
    [
        (31, "eval.lengths says 31 tokens and rows of data=recall are of pairs; take an even number"),
        (14, "eval.lengths says 14 tokens and data.num_queries=4 with as many pairs takes 16; raise"),
        (110, "eval.lengths says 110 tokens, which takes 51 different keys, and data.num_keys is 50"),
    ],
)
def test_a_length_that_no_row_has_is_named(length, sentence):
    assert OPTIONS.problems_of_length("eval.lengths", 16) == OPTIONS.problems_of_length("eval.lengths", 108) == []
    (problem,) = OPTIONS.problems_of_length("eval.lengths", length)
    assert problem.startswith(sentence)


def test_counts_that_make_no_task_are_named():
    assert OPTIONS.validate() == []
    problems = replace(OPTIONS, num_keys=0, num_values=1, num_queries=0, seed=-1).validate()
    assert problems == [
        "data.num_keys is 0; it must be at least 1",
        "data.num_values is 1; it must be at least 2",
        "data.num_queries is 0; it must be at least 1",
        "data.seed is -1; it must be at least 0",
    ]
