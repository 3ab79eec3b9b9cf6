"""What a site sends is checked before it is used."""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.errors import RemoteError
from freetrain_parsl.planning.sites.model import Offer
from freetrain_parsl.remote.sites.answers import SiteAnswer

ANSWER: dict[str, Any] = {
    "home": "c:/home/ft",
    "lease": 900,
    "order": 3,
    "status": {
        "run": "r-a",
        "state": "running",
        "host": "login1",
        "directory": "/r",
        "message": "",
        "summary": {
            "trainings": [
                {"name": "t", "state": "running", "share": 0.5, "nodes": ["n1"], "result": None, "error": None,
                 "remark": "x"},
            ]
        },
    },
    "held": [[2, 100.0]],
    "plan": {"blocks": [{"nodes": 3, "walltime": 600}]},
    "sizes": {"t": 10},
    "samples_left": {"t": 5},
    "measured": [[True, 100, 2.0], [False, 50, 1.0]],
    "copying": ["copying to home: t"],
}  # fmt: skip


def test_an_answer() -> None:
    answer = SiteAnswer.parse(ANSWER)
    assert answer.trainings["t"].nodes == ("n1",)
    assert (answer.held, answer.planned) == ((Offer(2, 100.0),), (Offer(3, 600.0),))
    assert (answer.copies_from_home, answer.copies_to_home) == (((100.0, 2.0),), ((50.0, 1.0),))
    assert SiteAnswer.parse({key: value for key, value in ANSWER.items() if key != "plan"}).planned is None


def paths(document: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the places of all values of a document."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    found = []
    for key, value in items:
        found.append((*here, key))
        if isinstance(value, dict | list):
            found += paths(value, (*here, key))
    return found


ODD = st.one_of(st.none(), st.text(max_size=3), st.integers(-5, 5), st.floats(), st.just([]), st.just({}), st.just([1]))


@given(st.sampled_from(paths(ANSWER)), ODD)
def test_any_other_value_anywhere_is_refused_or_is_valid(path: tuple[Any, ...], value: Any) -> None:
    document = copy.deepcopy(ANSWER)
    part = document
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with suppress(RemoteError):
        answer = SiteAnswer.parse(document)
        assert answer.facts.lease >= 0
        assert all(offer.nodes >= 0 for offer in answer.held)
        assert all(math.isfinite(size) and size >= 0 for size in answer.sizes.values())


@pytest.mark.parametrize("key", [key for key in ANSWER if key != "plan"])
def test_a_missing_part_is_refused(key: str) -> None:
    with pytest.raises(RemoteError, match="another version of freetrain-parsl"):
        SiteAnswer.parse({name: value for name, value in ANSWER.items() if name != key})
