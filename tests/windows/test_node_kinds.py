"""Windows of several kinds, merged from one source for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.model import BlockTerms, Window
from freetrain_parsl.windows.base import BlockState, BlockStatus, Survey, WindowSource
from freetrain_parsl.windows.node_kinds import WindowsByKind

if TYPE_CHECKING:
    from collections.abc import Sequence


class Stated(WindowSource):
    """A source with a given answer."""

    def __init__(self, survey: Survey, complaint: str = "") -> None:
        self.answer = survey
        self.complaint = complaint
        self.cancelled: list[str] = []

    def survey(self, job_ids: Sequence[str] = ()) -> Survey:
        return self.answer

    def cancel(self, job_ids: Sequence[str]) -> None:
        self.cancelled += job_ids

    def find_jobs(self, prefix: str) -> dict[str, str]:
        return {"1": f"{prefix}block"}

    def check(self, least_walltime: float) -> None:
        if self.complaint:
            raise InvalidSettings(self.complaint)


def merged(**surveys: Survey) -> Survey:
    return WindowsByKind({kind: Stated(survey) for kind, survey in surveys.items()}).survey(["1"])


def seen(*nodes: str, state: BlockState = BlockState.UNKNOWN, **values: object) -> Survey:
    windows = (Window(nodes, 0.0, 50.0),) if nodes else ()
    return Survey(10.0, windows, {"1": BlockStatus(state)}, **values)  # type: ignore[arg-type]


def test_windows_and_totals_are_kept_by_kind() -> None:
    survey = merged(
        gpu=seen("g1", nodes=4, terms=BlockTerms(min_nodes=2), effort=1.5, wanted={"g2": 30.0}, unused={"g3": "down"}),
        cpu=seen("c1", "c2", nodes=9, effort=1.0, notes=("hidden jobs",), wanted={"g2": 20.0}),
    )
    assert [(w.node_kind, w.nodes) for w in survey.windows] == [("cpu", ("c1", "c2")), ("gpu", ("g1",))]
    assert survey.terms_by_kind == {"gpu": BlockTerms(min_nodes=2), "cpu": BlockTerms()}
    assert (survey.nodes, survey.nodes_by_kind) == (13, {"gpu": 4, "cpu": 9})
    assert (survey.effort, survey.notes, survey.wanted) == (2.5, ("cpu: hidden jobs",), {"g2": 20.0})
    assert survey.unused == {"g3": "down"}


def test_a_node_of_two_kinds_is_one_of_the_first() -> None:
    survey = merged(gpu=seen("n1", "n2"), cpu=seen("n2", "n3"), other=seen("n1"))
    assert {w.node_kind: w.nodes for w in survey.windows} == {"gpu": ("n1", "n2"), "cpu": ("n3",)}
    assert survey.notes == (
        "n2: of the kinds 'gpu' and 'cpu', counted as 'gpu'",
        "n1: of the kinds 'gpu' and 'other', counted as 'gpu'",
    )


def test_a_job_has_the_state_that_any_source_knows() -> None:
    assert merged(gpu=seen(), cpu=seen(state=BlockState.RUNNING)).blocks["1"].state is BlockState.RUNNING
    assert merged(gpu=seen(), cpu=seen()).blocks["1"].state is BlockState.UNKNOWN


def test_the_total_is_unknown_if_that_of_a_kind_is() -> None:
    assert merged(gpu=seen(nodes=4), cpu=seen()).nodes is None


def test_errors_name_the_kind() -> None:
    source = WindowsByKind({"gpu": Stated(seen()), "cpu": Stated(seen(), "there is no partition 'cpus'")})
    with pytest.raises(InvalidSettings, match="node kind 'cpu': there is no partition 'cpus'"):
        source.check(60.0)


def test_jobs_are_found_and_cancelled_once() -> None:
    first, second = Stated(seen()), Stated(seen())
    source = WindowsByKind({"gpu": first, "cpu": second})
    assert source.find_jobs("p.") == {"1": "p.block"}
    source.cancel(["1"])
    assert (first.cancelled, second.cancelled) == (["1"], [])
