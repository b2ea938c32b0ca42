"""What stands at the axes and in the headings of all charts and tables."""

import pytest

from flashtrain.charts import short_count


@pytest.mark.parametrize(
    ("count", "short"),
    [(1, "1"), (1000, "1000"), (1024, "1k"), (131_072, "128k"), (1_048_576, "1M"), (1_572_864, "1536k")],
)
def test_a_count_of_tokens_is_short_where_it_is_round(count, short):
    assert short_count(count) == short
