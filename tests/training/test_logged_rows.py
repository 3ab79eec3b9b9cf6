"""The values that a training job passes to its trackers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from freetrain_parsl.errors import UsageError
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import Logged
from freetrain_parsl.training.fragment import run_fragment
from freetrain_parsl.training.mailbox import ControlMailbox, Membership
from freetrain_parsl.training.metrics import LoggedRows, TrainingMetrics


def _train(session, mailbox=None, stop_at=None, every=2, fail_at=None):
    x = torch.arange(8.0).reshape(8, 1)
    model, _ = session.prepare(torch.nn.Linear(1, 1), torch.optim.SGD, lr=1e-3)
    data = session.loader(TensorDataset(x, x), batch_size=2)
    for epoch in session.epochs(3):
        for a, b in data:
            session.step(mse_loss(model(a), b))
            session.log(every=every, batch=session.batch_loss)
            if session.metrics["steps"] == stop_at:
                mailbox.pause_requested.set()
        session.log(accuracy=epoch / 10)
        if epoch == fail_at:
            raise ValueError
    session.log(test=1.0)
    return session.metrics


def _rows(directory, reports=None, **arguments):
    reports = [] if reports is None else reports
    mailbox = ControlMailbox()
    run_fragment(
        _train,
        (mailbox,),
        arguments,
        options=SessionOptions("t", directory),
        membership=Membership("t"),
        meet=lambda membership: None,
        mailbox=mailbox,
        report=reports.append,
    )
    return _rows_in(reports)


def _rows_in(reports):
    return [json.loads(row) for report in reports if isinstance(report, Logged) for row in report.rows]


def _values(rows, name):
    return [(row["step"], row["values"][name]) for row in rows if name in row["values"]]


def test_epochs_and_chosen_steps_are_passed_on_with_their_steps(tmp_path) -> None:
    rows = _rows(tmp_path)
    assert [step for step, _ in _values(rows, "loss")] == [4, 8, 12]
    assert _values(rows, "accuracy") == [(4, 0.0), (8, 0.1), (12, 0.2)]
    assert [step for step, _ in _values(rows, "batch")] == [2, 4, 6, 8, 10, 12]
    assert _values(rows, "test") == [(12, 1.0)]
    assert [row["epoch"] for row in rows if "batch" not in row["values"]] == [0, 0, 1, 1, 2, 2, 2]
    assert {row["epoch"] for row in rows if "batch" in row["values"]} == {None}


def test_a_resumed_training_reports_again_what_its_checkpoint_has(tmp_path) -> None:
    before = _rows(tmp_path, stop_at=7)
    after = _rows(tmp_path)
    assert after[: len(before)] == before, "also if the first driver has lost all of them"
    assert [step for step, _ in _values(after, "batch")] == [2, 4, 6, 8, 10, 12]
    assert [step for step, _ in _values(after, "loss")] == [4, 8, 12]


def test_what_precedes_an_exception_is_passed_on(tmp_path) -> None:
    reports = []
    with pytest.raises(ValueError, match=r"^$"):
        _rows(tmp_path, reports, fail_at=1)
    assert _values(_rows_in(reports), "accuracy") == [(4, 0.0), (8, 0.1)]


@pytest.mark.parametrize("every", [0, -1, 1.5, "2"])
def test_every_is_a_whole_number(tmp_path, every) -> None:
    with pytest.raises(UsageError, match=r"session\.log: every must be"):
        _rows(tmp_path, every=every)


def test_rows_are_bounded_and_reported_in_portions() -> None:
    rows = LoggedRows(clock=lambda: 1.0)
    for step in range(3000):
        rows.add(step, 0, {"x": "y" * 1000, "none": None})
    portions = list(rows.reports(0))
    assert sum(map(len, portions)) == 1000
    assert all(sum(map(len, portion)) < 300_000 for portion in portions)
    assert json.loads(portions[-1][-1]) == {"step": 2999, "epoch": 0, "time": 1.0, "values": {"x": "y" * 500}}
    assert [json.loads(row)["step"] for portion in rows.reports(2998) for row in portion] == [2998, 2999]
    assert not list(rows.reports(3000))
    rows.add(3000, 0, {f"name{n}": 1.0 for n in range(10_000)})
    assert rows.count == 3000, "a row that no message can hold is left out"
    copy = LoggedRows()
    copy.load(rows.state())
    assert list(copy.reports(0)) == portions


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (torch.tensor(2.0), 2.0),
        (torch.tensor([[3]]), 3),
        (torch.tensor([1.5], dtype=torch.bfloat16), 1.5),
        (np.float32(0.5), 0.5),
        (np.array([4]), 4),
        (np.array(True), True),
        (np.str_("a"), "a"),
    ],
)
def test_tensors_and_arrays_of_one_element_are_logged_as_plain_values(value, plain) -> None:
    metrics = TrainingMetrics()
    metrics.log({"v": value})
    logged = metrics.state()["log"]["v"]
    assert (logged, type(logged)) == (plain, type(plain))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([1.0, 2.0]), r"session\.log\(v=…\) takes one number or string, got ndarray of shape \(2,\); log its"),
        (torch.zeros(2, 3), r"got Tensor of shape \(2, 3\); log its mean, or each of its elements with a name"),
        (torch.zeros(0), r"got Tensor of shape \(0,\)"),
        (np.array([1j]), "takes numbers and strings, got complex"),
    ],
)
@pytest.mark.parametrize("by_steps", [False, True])
def test_other_tensors_and_arrays_are_refused_by_name_and_shape(value, words, by_steps) -> None:
    metrics = TrainingMetrics()
    metrics.step = 1
    with pytest.raises(UsageError, match=words):
        metrics.log_step(1, {"v": value}) if by_steps else metrics.log({"v": value})
