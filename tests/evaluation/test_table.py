import numpy as np
import pyarrow.parquet as pq

from flashtrain.evaluation.table import read_table, write_table


def test_a_parquet_file_holds_every_row_and_what_it_depends_on(random_stream, evaluation_of, recurrent_nll, tmp_path):
    evaluation = evaluation_of(recurrent_nll, random_stream(200, 130), window=48, stride=16, key_tokens="self")
    write_table(evaluation.table, tmp_path / "targets.parquet", {"options": {"window": 48}})
    again, facts = read_table(tmp_path / "targets.parquet")
    assert facts == {"options": {"window": 48}}
    for name, column in vars(evaluation.table).items():
        assert np.array_equal(column, getattr(again, name)) and column.dtype == getattr(again, name).dtype, name


def test_other_programs_read_purposes_in_words(random_stream, evaluation_of, recurrent_nll, tmp_path):
    evaluation = evaluation_of(recurrent_nll, random_stream(200), window=48, key_tokens="self")
    write_table(evaluation.table, tmp_path / "targets.parquet", {})
    columns = pq.read_table(tmp_path / "targets.parquet")
    assert columns.column_names == [
        "purpose", "length", "window", "document", "position", "context", "offset", "bytes", "nll",
    ]  # fmt: skip
    assert set(columns["purpose"].to_pylist()) == {"opening", "context", "strided", "short"}


def test_lengths_are_those_that_were_fed_for_a_purpose(random_stream, evaluation_of, recurrent_nll):
    table = evaluation_of(recurrent_nll, random_stream(200, 20), window=48).table
    assert table.lengths("opening") == [128]
    assert table.lengths("context") == [32, 64, 128]
    assert table.lengths("strided") == [19, 48]
    assert len(table.of("context", 64)) == 16


def test_each_window_has_a_number_of_its_own(random_stream, evaluation_of, recurrent_nll):
    table = evaluation_of(recurrent_nll, random_stream(200, 140), window=48, stride=10).table
    for window in np.unique(table.window):
        rows = table.where(table.window == window)
        assert len({*rows.document}) == len({*rows.length}) == len({*rows.purpose}) == 1
        assert len({*(rows.position - rows.context)}) == 1, "all of one window start at one place"
        assert np.array_equal(np.diff(rows.position), np.ones(len(rows) - 1))
