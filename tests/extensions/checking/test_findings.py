"""What records say about a function: one test for each kind of sentence, without processes."""

from __future__ import annotations

import io
import json
import math
import pickle
from typing import TYPE_CHECKING
from zipfile import BadZipFile

import numpy as np
import pytest
import torch

from freetrain_parsl.extensions.checking.comparisons import first_difference, gradient_gap, reason_for_gap
from freetrain_parsl.extensions.checking.findings import Judge
from freetrain_parsl.extensions.checking.records import CRASHED, Frame, Graph, Kind, Leaf, Scalar, Value, Variant
from freetrain_parsl.extensions.checking.report import CheckReport, CheckVerdict
from tests.extensions.checking.recorded import LINE, change, hold, number, place, training

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.extensions.checking.records import ProcessRecord

SOURCE = """\
def train(session):
    model, best = make(), 1e9
    it = 0
    for epoch in session.epochs(3):
        for x, y in data:
            rate = 0.1 / (1 + it)
            session.step(rate * loss(model(x), y))
            it += 1
    return best
"""


@pytest.fixture
def frame(tmp_path: Path) -> Frame:
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    return Frame("train", str(file), 1)


def judged(plain: ProcessRecord, at: int = 2) -> tuple[Judge, CheckReport]:
    report = CheckReport("train", LINE)
    return Judge(report, plain, "train.py", at), report


def test_nothing_is_found_where_nothing_differs() -> None:
    judge, report = judged(training())
    judge.look_at_plain()
    judge.resumed(training(2), training(first=2))
    pair = [training(size=2), training(size=2)]
    assert judge.members(2, pair, training(), pair) is None
    judge.joined([training(), training(first=2)], pair)
    judge.failed(training(), training())
    judge.fused(training(), training())
    assert report.verdict is CheckVerdict.HOLDS
    assert [row.holds for row in report.rows] == [True] * 5
    assert str(report).startswith("train (train.py:20) survives being moved: all 5 comparisons hold\n")


def test_a_carried_variable_is_named_with_line_use_effect_and_mend(frame: Frame) -> None:
    plain = hold(training(frames=[frame]), "train|it", {3: number(3), 4: number(4)})
    second = hold(training(first=2), "train|it", {3: number(1), 4: number(2)})
    change(second, 3, "lr of the optimizer", 0.05, Kind.RATE)
    judge, report = judged(plain)
    judge.resumed(training(2), second)
    (found,) = report.causes
    assert (found.kind, found.name, found.where) == ("variable", "it", f"{frame.file}:8")
    assert found.text == (
        "`it` (train.py:8) begins anew in a process that joins or resumes: 1 instead of 3, one step after step 2."
    )
    assert found.details == (
        "It reaches the loss (line 7).",
        "Then lr of the optimizer differs from epoch 0, sample 48 on: 0.05 instead of 0.1.",
    )
    assert found.mend.startswith("state = session.state(it=0) before the loop, and state.it in its place; or session.m")
    assert report.rows[0].text == "lr of the optimizer differs from epoch 0, sample 48 on: 0.05 instead of 0.1"


def test_a_variable_that_each_round_computes_anew_is_a_consequence(frame: Frame) -> None:
    plain = hold(training(frames=[frame]), "train|rate", {3: number(0.3)})
    second = change(hold(training(first=2), "train|rate", {3: number(0.1)}), 3, "model.weight", 9.0)
    judge, report = judged(plain)
    judge.resumed(training(2), second)
    (found,) = report.causes
    assert found.kind == "resume"
    assert found.text.endswith("; no variable of the function explains it.")


def test_clocks_are_not_accused(frame: Frame) -> None:
    """What differs between two runs that were not moved is no state."""
    plain = hold(training(frames=[frame]), "train|it", {1: number(0.1), 3: number(3)})
    first = hold(training(2), "train|it", {1: number(0.2)})
    judge, report = judged(plain)
    judge.resumed(first, hold(training(first=2), "train|it", {3: number(4)}))
    assert report.findings == []


def test_two_runs_that_differ_are_not_repeatable() -> None:
    judge, report = judged(training())
    judge.resumed(change(training(2), 1, "model.weight", 7.0), training(first=2))
    (found,) = report.causes
    assert (found.kind, found.name) == ("not repeatable", "model.weight")


def test_a_buffer_that_is_assigned_anew_is_named_only_if_it_differs() -> None:
    plain = training(events=[("buffer assigned", "model.mean")])
    group = [change(training(size=2), 1, "model.mean", value, Kind.BUFFER) for value in (0.1, 0.6)]
    judge, report = judged(plain)
    judge.look_at_plain()
    judge.members(2, [training(size=2)] * 2, plain, [training(size=2)] * 2)
    assert report.findings == []
    judge.members(2, group, plain, group)
    (found,) = report.causes
    assert (found.kind, found.name) == ("buffer", "model.mean")
    assert found.details == ("`model.mean` is assigned anew in the loop.",)


@pytest.mark.parametrize(
    ("name", "kind", "expected", "text"),
    [
        ("lr of the optimizer", Kind.RATE, "hyperparameter", "use a different lr of the optimizer (0.1 and 0.6) from"),
        ("model.mean", Kind.BUFFER, "buffer", "Buffer `model.mean` differs between processes from epoch 0, sample 16"),
        ("model.weight", Kind.PARAMETER, "replicas", "`model.weight` differs between the processes from epoch 0, s"),
    ],
)
def test_replicas_that_differ(name: str, kind: Kind, expected: str, text: str) -> None:
    group = [change(training(size=2), 1, name, 0.1, kind), change(training(size=2), 1, name, 0.6, kind)]
    judge, report = judged(training())
    judge.members(2, group, training(), group)
    (found,) = report.causes
    assert (found.kind, found.name, found.where) == (expected, name, LINE)
    assert text in found.text
    assert report.rows[0].text.startswith("they differ from each other: ")


def test_statistics_of_batch_norm_may_differ() -> None:
    group = [change(training(size=2), 1, "model.running_mean", value, Kind.STATISTICS) for value in (0.1, 0.6)]
    judge, report = judged(training())
    judge.members(2, group, training(), group)
    assert report.findings == []


def test_what_the_session_says_of_replicas_is_repeated_once() -> None:
    """The session compares replicas itself; its error has the line and the cause."""
    error = "ReplicasDiffer: job 'check': its processes no longer agree: lr is 0.1 on rank 0; usually a rank: use agree"
    group = [training(1, size=2, error=error, trace=LINE) for _ in range(2)]
    judge, report = judged(training())
    judge.members(2, group, training(), group)
    judge.members(3, group, training(), group)
    (found,) = report.causes
    assert found.text == "On 2 processes (train.py:20) lr is 0.1 on rank 0."
    assert (found.kind, found.where, found.mend) == ("replicas", LINE, "use agree")
    assert [row.text for row in report.rows] == ["they differ from each other: lr is 0.1 on rank 0"] * 2


def of_pair(gradient: float, loss: float = 1.0, scalar: float = math.nan) -> list[ProcessRecord]:
    pair = [training(size=2), training(size=2)]
    for record in pair:
        for step in record.steps:
            step.loss, step.gradients = loss, {"model.weight": number(gradient)}
            step.scalars = (Scalar("train.py:19", "norm", scalar),)
    return pair


def of_one(graph: Graph | None = None, scalar: float = math.nan) -> ProcessRecord:
    one = training()
    for step in one.steps:
        step.graph, step.scalars = graph or Graph(), (Scalar("train.py:19", "norm", scalar),)
    return one


@pytest.mark.parametrize(
    ("one", "pair", "where", "text"),
    [
        (of_one(), of_pair(0.5), LINE, "the loss is a sum over the batch"),
        (of_one(Graph(weighted=True)), of_pair(0.9), LINE, "a mean over weights, not over samples"),
        (of_one(Graph(checkpoint=True)), of_pair(0.6), LINE, "under torch.utils.checkpoint(use_reentrant=True)"),
        (of_one(scalar=4.0), of_pair(0.9, scalar=3.0), "train.py:19", "norm is 4 on the batch, but 3 as the mean of 2"),
        (of_one(), of_pair(0.9), LINE, "differs by 10% from that of one, in step 1."),
    ],
    ids=["sum", "weights", "checkpoint", "whole batch", "unknown"],
)
def test_a_gradient_that_differs_has_a_reason(
    one: ProcessRecord, pair: list[ProcessRecord], where: str, text: str
) -> None:
    judge, report = judged(one)
    gap = judge.members(2, pair, one, pair)
    assert gap is not None
    assert judge.needs_reason(gap)
    judge.add([reason_for_gap(gap, one, pair, one, pair)])
    (found,) = report.causes
    assert (found.kind, found.where) == ("loss", where)
    assert text in found.text
    assert not judge.needs_reason(gap)


def test_processes_that_wait_for_each_other_are_told_apart() -> None:
    group = [
        training(1, size=2, hangs=True, error="it did not end", trace="train.py:7"),
        training(1, size=2, error=f"{CRASHED} SIGABRT", trace="train.py:9"),
    ]
    judge, report = judged(training())
    judge.members(2, group, training(), group)
    assert judge.hangs
    (found,) = report.causes
    assert found.text == (
        "On 2 processes, they do not make the same calls: process 0 waits at train.py:7; process 1 was ended by "
        "SIGABRT at train.py:9."
    )


def test_an_error_of_the_function_is_in_its_own_words() -> None:
    judge, report = judged(training())
    judge.resumed(training(2), training(2, first=2, error="KeyError: 'best'", trace="train.py:5"))
    (found,) = report.causes
    assert (found.kind, found.text, found.where) == (
        "error",
        "After a resume: KeyError: 'best' (train.py:5)",
        "train.py:5",
    )


def test_a_member_of_a_failed_group_may_count_twice() -> None:
    plain, survivor = training(), training()
    for record, more in ((plain, 0), (survivor, 1)):
        hold(record, "train|seen", {step: number(step + more) for step in (3, 4)})
    judge, report = judged(plain)
    judge.failed(survivor, plain)
    (note,) = report.findings
    assert note.note
    assert note.text.startswith("`seen` is 4 instead of 3 after another process has failed in a batch")
    assert report.holds


def test_what_cannot_be_fused_is_said_and_no_cause() -> None:
    judge, report = judged(training())
    judge.fused(training(notes=["its loader has micro_batch="]), training())
    (row,) = report.rows
    assert (row.text, row.holds) == ("not fused: its loader has micro_batch=", None)
    assert report.holds


def test_globals_are_shared_by_the_members_of_an_array() -> None:
    plain = hold(training(), "global|STEPS", {2: number(2)})
    member = change(hold(training(), "global|STEPS", {2: number(4)}), 2, "model.weight", 9.0)
    judge, report = judged(plain)
    judge.fused(member, plain)
    (found,) = report.causes
    assert (found.kind, found.name) == ("array", "STEPS")


def test_rounding_is_no_difference_and_its_scale_is_that_of_the_family() -> None:
    """Of a gradient that is zero only rounding is left, in another direction on another number of processes."""

    def with_moments(noise: float) -> ProcessRecord:
        record = training()
        for states in record.states.values():
            states["exp_avg of a"] = Value(number(1.0), Kind.MOMENT, "optimizer exp_avg")
            states["exp_avg of b"] = Value(number(noise), Kind.MOMENT, "optimizer exp_avg")
        return record

    assert first_difference(with_moments(1e-17), with_moments(-3e-17), 1e-7) is None
    difference = first_difference(with_moments(1e-17), with_moments(1e-3), 1e-7)
    assert difference is not None
    assert (difference.name, difference.place) == ("exp_avg of b", place(0))


def test_texts_and_numbers_of_different_precision_differ_by_their_bits() -> None:
    one, other = Leaf(b"1", "'a'"), Leaf(b"2", "'b'")
    assert one.differs(other)
    assert one.differs(other, 1e-7)
    assert not one.differs(Leaf(b"1", "'a'"), 1e-7)
    assert number(1.0).differs(number(1.0 + 1e-9))
    assert not number(1.0).differs(number(1.0 + 1e-9), 1e-7)
    assert number(1.0).differs(number(math.nan), 1e-7)


def test_the_gap_of_gradients_is_measured_over_all_parameters() -> None:
    one, many = training(), training()
    many.steps[2].gradients = {"model.weight": number(0.75)}
    gap = gradient_gap(one, many, 1e-7)
    assert gap is not None
    assert (gap.number, gap.share, gap.ratio) == (2, 0.25, 0.75)
    assert gradient_gap(one, many, 1e-7, steps=2) is None


def test_the_report_is_json_and_says_what_does_not_run() -> None:
    report = CheckReport("train", LINE, failure="KeyError: 'x' (train.py:3)")
    assert report.verdict is CheckVerdict.DOES_NOT_RUN
    assert str(report) == "train (train.py:20) does not run\n\n  KeyError: 'x' (train.py:3)"
    assert report.as_json()["verdict"] == "does not run"


FILES = {
    "torch": (lambda file: torch.save(torch.nn.Linear(8, 8).state_dict(), file), torch.load),
    "pickle": (lambda file: pickle.dump({"best": list(range(64))}, file), pickle.load),
    "npz": (lambda file: np.savez(file, weight=np.zeros(64)), np.load),
    "json": (lambda file: file.write(json.dumps({"best": 1.5}).encode()), json.load),
}
"""How a file is written, and read."""


def _of_half_a_file(kind: str, share: float) -> str:
    """Return the error of reading a file of which only a share is written, in the words of a record."""
    write, read = FILES[kind]
    file = io.BytesIO()
    write(file)
    half = io.BytesIO(file.getvalue()[: int(len(file.getvalue()) * share)])
    with pytest.raises((EOFError, RuntimeError, ValueError, pickle.UnpicklingError, BadZipFile)) as caught:
        read(half)
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("kind", FILES)
def test_half_a_file_is_one_that_another_process_writes(kind: str, share: float) -> None:
    """`best.pt`, which all processes save and load: also in one that joins, but not in one that is alone."""
    error = _of_half_a_file(kind, share)
    mend = "let only the first write, under `if session.is_main_process:`"
    pair = [training(size=2), training(size=2, error=error, trace=LINE)]
    judge, report = judged(training())
    judge.members(2, pair, training(), [training(size=2), training(size=2)])
    assert [mend in finding.mend for finding in report.findings] == [True]
    newcomer = training(first=2, error=error, trace=LINE)
    newcomer.variant = Variant(grow_at=2)
    judge, report = judged(training())
    judge.joined([training(), newcomer], [training(size=2), training(size=2)])
    assert [mend in finding.mend for finding in report.findings] == [True]
    judge, report = judged(training())
    judge.resumed(training(2), training(first=2, error=error, trace=LINE))
    assert [mend in finding.mend for finding in report.findings] == [False]
