"""Every operator has, fused, the results that each training job has alone, or is refused with a reason."""

from __future__ import annotations

import pytest

from tests.extensions.fusion.cases import CASES
from tests.extensions.fusion.operator_table import PAGE, outcome, page


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_are_those_of_each_training_alone_or_refused(case):
    """On different samples, with different random numbers; the table of the documentation covers the others, too."""
    kind, reason = outcome(case, shared=False, agree=False)
    assert kind in {"fused", "row by row", "refused"}, reason
    assert "\n" not in reason


@pytest.mark.slow
def test_the_table_in_the_documentation_is_what_the_tests_find():
    """The same and different samples and random numbers: each line is what was computed."""
    assert "different:" not in page()
    assert PAGE.read_text(encoding="utf-8") == page()
