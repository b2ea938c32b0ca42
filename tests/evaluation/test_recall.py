"""Recall of models whose every answer is known: what is counted, by length and by depth, and what is written."""

import csv
import io
import json
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
import torch
from eval_options import OPTIONS
from rich.console import Console

from flashtrain.evaluation.recall import Recall, evaluate_recall
from flashtrain.evaluation.recall_report import terminal_recall, write_recall
from flashtrain.evaluation.table import RecallTable, read_table

LENGTHS, ANSWERS, DOCUMENTS, VALUES = [20, 44, 84], 2, 30, 8


class Stream:
    """Documents [99] k v k v ... q a q a: keys are 0, 1, ..., values 50 to 57, the questions of two keys at the end."""

    def document(self, i, length):
        rng = np.random.default_rng(i)
        pairs = length // 2 - ANSWERS
        keys, values = rng.permutation(50)[:pairs], 50 + rng.integers(VALUES, size=pairs)
        asked = rng.permutation(pairs)[:ANSWERS]
        said = np.stack([keys, values], axis=1)
        tokens = np.r_[99, said.ravel(), said[asked].ravel()]
        return tokens, (asked / (pairs - 1)).astype(np.float32)

    def scored(self, i, length):
        return slice(length + 1 - 2 * ANSWERS, None, 2)


def lookup(reach=None):
    """A model that has the last `reach` tokens before a query and else knows nothing: 0.25 nats, or 3 and wrong."""

    def score(inputs, targets):
        scores = torch.zeros(2, *inputs.shape)
        for row, tokens in enumerate(inputs):
            for place in (targets[row] >= 0).nonzero()[:, 0].tolist():
                seen = tokens[max(0, place - (reach or place)) : place]
                found = (seen == tokens[place]).any()
                scores[:, row, place] = torch.tensor([0.25, 1.0] if found else [3.0, 0.0])
        return scores

    return score


@pytest.fixture
def evaluate(conditions):
    def build(score, batch_tokens=200):
        options = replace(OPTIONS, lengths=LENGTHS, max_documents=DOCUMENTS, batch_tokens=batch_tokens)
        return evaluate_recall(
            score,
            Stream(),
            num_values=VALUES,
            options=options,
            conditions=replace(conditions, training_length=44),
            console=Console(file=io.StringIO()),
        )

    return build


def test_ninfer_171_an_answer_is_right_where_its_token_is_the_likeliest(evaluate):
    evaluation = evaluate(lookup())
    for length in LENGTHS:
        recall = evaluation.at_length[length]
        assert (recall.accuracy, recall.targets, recall.loss) == (1.0, ANSWERS * DOCUMENTS, 0.25)
        of_depths = [recall for (one, _), recall in evaluation.by_depth.items() if one == length]
        assert sum(recall.targets for recall in of_depths) == ANSWERS * DOCUMENTS
        assert {recall.accuracy for recall in of_depths} == {1.0}


def test_a_model_that_forgets_is_right_at_the_end_alone(evaluate):
    """Of 84 tokens the last 40 before a query are from depth 0.5 or so on."""
    evaluation = evaluate(lookup(reach=40))
    accuracies = [evaluation.by_depth[84, depth].accuracy for depth in range(10)]
    assert accuracies[:5] == [0.0] * 5 and accuracies[6:] == [1.0] * 4
    assert evaluation.at_length[20].accuracy == 1.0
    recall = evaluation.at_length[84]
    assert recall.loss == pytest.approx(0.25 * recall.accuracy + 3 * (1 - recall.accuracy))


def test_the_table_has_a_row_for_each_answer(evaluate):
    table = evaluate(lookup(reach=40)).table
    assert len(table) == len(LENGTHS) * DOCUMENTS * ANSWERS
    last = table.of("recall", 84)
    assert last.position.tolist() == [82, 84] * DOCUMENTS
    assert last.document.tolist() == np.repeat(np.arange(DOCUMENTS), 2).tolist()
    assert last.window.tolist() == np.repeat(2 * DOCUMENTS + np.arange(DOCUMENTS), 2).tolist()
    assert last.depth.tolist() == np.concatenate([Stream().document(i, 84)[1] for i in range(DOCUMENTS)]).tolist()
    assert ((last.nll == 0.25) == last.correct).all()


@pytest.mark.parametrize("batch_tokens", [1, 1000], ids="batches-of-{}".format)
def test_recall_does_not_depend_on_the_batch(evaluate, batch_tokens):
    expected, other = evaluate(lookup(40)), evaluate(lookup(40), batch_tokens)
    assert other.by_depth == expected.by_depth and other.at_length == expected.at_length


def test_the_interval_is_wilsons():
    """Of 10 in 10: 1 / (1 + z^2 / 10) to 1; and Newcombe's example (1998) of 81 in 263."""
    assert Recall(10, 10, 0.0).interval == pytest.approx((1 / (1 + 1.959964**2 / 10), 1.0))
    assert Recall(81, 263, 0.0).interval == pytest.approx((0.2553, 0.3662), abs=1e-4)


def test_reports_have_every_figure(evaluate, tmp_path):
    evaluation = evaluate(lookup(reach=40))
    json_path, csv_path, png_path, table_path = write_recall(evaluation, tmp_path)
    report = json.loads(json_path.read_text())
    by_length = {row["length"]: row for row in report["recall_at_length"]}
    for length, recall in evaluation.at_length.items():
        row = by_length[length]
        assert (row["accuracy"], row["correct"], row["targets"]) == (recall.accuracy, recall.correct, recall.targets)
        assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"]
        assert row["beyond_training_length"] is (length > 44)
    assert report["chance"] == 1 / VALUES and report["documents_of_each_length"] == DOCUMENTS
    assert report["options"]["lengths"] == LENGTHS and "window" not in report["options"]
    assert report["conditions"]["model"] == "nano"
    with csv_path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "recall_by_depth"]
    assert [(int(row["length"]), float(row["depth_from"])) for row in rows] == [
        (length, depth / 10) for length, depth in evaluation.by_depth
    ]
    table, facts = read_table(table_path, RecallTable)
    assert all(np.array_equal(column, getattr(evaluation.table, name)) for name, column in vars(table).items())
    assert facts["chance"] == 1 / VALUES
    height, width, _ = matplotlib.image.imread(png_path).shape
    assert height > 600 and width > 500


def test_the_terminal_shows_depths_and_lengths(evaluate):
    console = Console(file=io.StringIO(), width=80)
    console.print(terminal_recall(evaluate(lookup(reach=40))))
    text = console.file.getvalue()
    lines = {line[1:11].strip(): line.split()[-3:] for line in text.splitlines() if line.startswith(" ")}
    assert lines["0.9 to 1.0"] == ["100.0", "100.0", "100.0"]
    assert lines["0.0 to 0.1"][0] == "100.0" and lines["0.0 to 0.1"][2] == "0.0"
    assert lines["answers"] == ["60", "60", "60"]
    assert "84 *" in text and "* beyond the training length of 44 tokens" in text
    assert "A guess is right in 12.50%" in " ".join(text.split())
