"""What a site sends is checked before it is used."""

from __future__ import annotations

import copy
import json
import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.errors import RemoteError
from freetrain_parsl.extensions.globus.sites.planning.model import Offer
from freetrain_parsl.extensions.globus.sites.state import SiteAnswer

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
    "plan": {"blocks": [{"nodes": 3, "walltime": 600}], "slots_per_node": 4, "units_per_node": 4},
    "sizes": {"t": 10},
    "samples_left": {"t": 5},
    "measured": [[True, 100, 2.0], [False, 50, 1.0]],
    "copying": ["copying to home: t"],
    "retried": {},
}  # fmt: skip


def test_an_answer() -> None:
    answer = SiteAnswer.parse(ANSWER)
    assert answer.trainings["t"].nodes == ("n1",)
    assert (answer.held, answer.planned) == ((Offer(2, 100.0),), (Offer(3, 600.0),))
    assert (answer.slots_per_node, answer.units_per_node) == (4, 4)
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


HUGE = 10**400  # an integer that is no float
ODD = st.one_of(
    st.none(), st.text(max_size=3), st.integers(-5, 5), st.floats(), st.sampled_from([[], {}, [1], HUGE, "\ud800"])
)


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return the answer with another value at a place."""
    document = copy.deepcopy(ANSWER)
    part: Any = document
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return document


@given(st.sampled_from(paths(ANSWER)), ODD)
def test_any_other_value_anywhere_is_refused_or_is_valid(path: tuple[Any, ...], value: Any) -> None:
    with suppress(RemoteError):
        answer = SiteAnswer.parse(changed(path, value))
        assert answer.facts.lease >= 0
        assert all(offer.nodes >= 0 for offer in answer.held)
        assert all(math.isfinite(size) and size >= 0 for size in answer.sizes.values())
        shown = [answer.message, answer.plan_error, *answer.copying]
        for training in answer.trainings.values():
            shown += [*training.nodes, str(training.error), str(training.remark), json.dumps(training.result)]
        assert all(text.isprintable() for text in shown)


@pytest.mark.parametrize(
    "path",
    [
        ("lease",),
        ("order",),
        ("held", 0, 0),
        ("held", 0, 1),
        ("plan", "blocks", 0, "nodes"),
        ("plan", "blocks", 0, "walltime"),
        ("plan", "slots_per_node"),
        ("plan", "units_per_node"),
        ("sizes", "t"),
        ("samples_left", "t"),
        ("measured", 0, 1),
        ("status", "summary", "trainings", 0, "share"),
    ],
)
def test_an_integer_that_is_no_float_is_refused(path: tuple[Any, ...]) -> None:
    with pytest.raises(RemoteError, match="unexpected answer"):
        SiteAnswer.parse(changed(path, HUGE))


def test_texts_are_safe_to_show_and_to_store() -> None:
    path = ("status", "summary", "trainings", 0)
    answer = SiteAnswer.parse(changed((*path, "remark"), "\x1b]0;title\x07\ud800 and\nmore"))
    assert answer.trainings["t"].remark == " ]0;title   and\nmore"
    with pytest.raises(RemoteError, match="unexpected answer"):
        SiteAnswer.parse(changed((*path, "result"), {"loss": "\ud800"}))


@pytest.mark.parametrize("key", [key for key in ANSWER if key != "plan"])
def test_a_missing_part_is_refused(key: str) -> None:
    with pytest.raises(RemoteError, match="another version of freetrain-parsl"):
        SiteAnswer.parse({name: value for name, value in ANSWER.items() if name != key})
