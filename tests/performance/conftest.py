from dataclasses import replace

import pytest

from flashtrain.kernels.attention.variants import VARIANTS


@pytest.fixture
def variant_that(monkeypatch):
    """variant_that(attend) -> the name of a variant that can do everything and does that."""

    def add(attend):
        monkeypatch.setitem(VARIANTS, "made_up", replace(VARIANTS["standard"], attend=attend, attend_alone=None))
        return "made_up"

    return add
