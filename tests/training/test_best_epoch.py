"""The best epoch is kept, and the training job stops early: alike on all processes, and after a restart."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from best_trainings import EPOCHS, STEPS, VALUES, train
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset
from training_crew import run_member

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.best_epoch import BestEpoch, BestEpochs, EpochValue
from freetrain_parsl.training.fragment import Finished, Membership, Paused
from tests.extensions.fusion.sweep_trainings import together

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew


@given(
    st.lists(st.one_of(st.integers(-5, 5).map(float), st.just(math.nan)), max_size=12),
    st.sampled_from(["min", "max"]),
    st.integers(1, 4),
    st.sampled_from([0.0, 1.0]),
)
def test_the_best_epoch_and_the_stop_are_those_of_the_whole_list(values, mode, patience, min_delta) -> None:
    """Compared with a search through all values so far, after each of them."""
    best = BestEpoch("stop_early", "accuracy", mode, min_delta, patience)
    sign = 1 if mode == "max" else -1
    leader, since = -math.inf, 0
    for epoch, value in enumerate(values):
        gain = sign * value - leader
        better = not math.isnan(value) and (gain > min_delta or math.isinf(leader))
        leader, since = (sign * value, 0) if better else (leader, since + 1)
        assert best.judge(epoch, value) == better
        assert best.is_over == (since >= patience)
    if not math.isinf(leader):
        assert best.best is not None
        assert best.best.value == sign * leader


def test_a_state_is_that_of_one_metric_and_mode() -> None:
    one, other = BestEpochs(), BestEpochs()
    one.followed["keep_best"] = BestEpoch("keep_best", "accuracy", "max")
    one.judge(0, [0.5], nn.Linear(1, 1).state_dict)
    other.followed["keep_best"] = BestEpoch("keep_best", "accuracy", "min")
    other.load(one.state())
    with pytest.raises(UsageError, match="no epoch had a value other than NaN"):
        other.kept()
    other.followed["keep_best"] = BestEpoch("keep_best", "accuracy", "max")
    other.load(one.state())
    assert other.kept()[0] == EpochValue(0, 0.5)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("", "max"), "give the name of a logged value"),
        ((1, "max"), "give the name of a logged value"),
        (("loss", "best"), "mode must be 'min' or 'max'"),
        (("loss", "min", -1.0), "min_delta must be a number that is not negative"),
        (("loss", "min", math.nan), "min_delta must be"),
        (("loss", "min", True), "min_delta must be"),
        (("loss", "min", 0.0, 0), "patience must be at least 1"),
        (("loss", "min", 0.0, 1.5), "patience must be a whole number"),
    ],
)
def test_parameters_out_of_range_are_refused(arguments, why) -> None:
    with pytest.raises(UsageError, match=f"session.stop_early: {why}"):
        BestEpoch("stop_early", *arguments)


def alone(root: Path, function: Any = train, **settings: Any) -> Any:
    return run_member(function, settings, root=root, membership=Membership("net"))


def check(outcome: Any, plain: dict[str, Any], *, within: float = 0.0) -> None:
    """Compare a result with that of an undisturbed training job: the same epoch is kept, with the same weights."""
    assert outcome is not None
    assert isinstance(outcome.end, Finished), outcome.error
    result = outcome.end.value
    assert (result["epochs"], result["best"]) == (6, (2, 0.9))
    for one, other in ((result["loaded"], plain["weights"][2]), (result["last"], plain["last"])):
        assert float((one - other).abs().max()) <= within
    assert not torch.equal(result["loaded"], result["last"])


@pytest.fixture
def plain(tmp_path) -> dict[str, Any]:
    end = alone(tmp_path / "plain").end
    assert isinstance(end, Finished)
    return end.value


def test_it_stops_after_the_epochs_without_a_better_value_and_has_the_best(plain, tmp_path) -> None:
    check(alone(tmp_path), plain)
    assert sorted(plain["weights"]) == list(range(6))


def test_the_best_is_in_the_last_checkpoint(tmp_path) -> None:
    end = alone(tmp_path).end
    state = torch.load(end.checkpoint / "state.pt", weights_only=True)
    assert torch.equal(state["best"]["model"]["weight"], end.value["loaded"])
    assert torch.equal(state["objects"]["model"]["weight"], end.value["loaded"])
    assert state["best"]["epochs"]["keep_best"]["best"] == [2, 0.9]


@pytest.mark.parametrize("epoch", range(6))
def test_a_restart_changes_nothing(plain, tmp_path, epoch) -> None:
    stopped = alone(tmp_path, pause_at=(epoch + 1) * STEPS).end
    if epoch < 5:  # with the last one, it has stopped
        assert isinstance(stopped, Paused)
    outcome = alone(tmp_path)
    if epoch == 5:
        assert isinstance(outcome.end, Finished)
        assert outcome.end.value["weights"] == {}, "it has stopped before"
        assert outcome.end.value["best"] == (2, 0.9)
    else:
        check(outcome, plain)


def test_without_patience_all_epochs_are_trained(tmp_path) -> None:
    result = alone(tmp_path, patience=None).end.value
    assert (result["epochs"], result["best"]) == (EPOCHS, (7, VALUES[7]))


@pytest.mark.parametrize("values", [[math.nan] * 8, [0.1] + [math.nan] * 7])
def test_nan_is_never_better(tmp_path, values) -> None:
    outcome = alone(tmp_path, values=values, patience=None)
    if math.isnan(values[0]):
        assert outcome.error.startswith("UsageError: session.load_best: there is no best epoch; no epoch had")
    else:
        assert outcome.end.value["best"] == (0, 0.1)


def _session_that(use) -> Any:
    def function(session):
        model, _ = session.prepare(nn.Linear(1, 1), torch.optim.SGD, lr=0.1)
        x = torch.ones(4, 1)
        data = session.loader(TensorDataset(x, x), batch_size=4)
        use(session)
        for epoch in session.epochs(2):
            for a, b in data:
                session.step(nn.functional.mse_loss(model(a), b))
            session.log(accuracy=1.0, name="x")
            if epoch == 1:
                with pytest.raises(UsageError, match=r"call session\.keep_best before the loop"):
                    session.load_best()
                session.stop_early("loss", mode="min", patience=1)

    return function


def _twice(session) -> None:
    session.keep_best("loss", mode="min")
    session.keep_best("accuracy", mode="max")


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (_twice, "call session.keep_best once, with one metric"),
        (lambda session: session.load_best(), "call session.load_best inside or after `for epoch"),
        (lambda session: session.keep_best("acc", mode="max"), "epoch 0 has no number 'acc'; call session.log(acc=…)"),
        (lambda session: session.keep_best("name", mode="max"), "epoch 0 has no number 'name'"),
        (lambda session: None, "call session.stop_early before `for epoch in session.epochs(…)`"),
    ],
)
def test_mistakes_are_errors_of_one_line(tmp_path, use, why) -> None:
    outcome = alone(tmp_path, _session_that(use))
    assert outcome.error.startswith("UsageError: ")
    assert why in outcome.error
    assert "\n" not in outcome.error


def test_members_of_an_array_keep_their_own_best_and_stop_by_themselves(tmp_path) -> None:
    points = [{"lr": 0.1}, {"lr": 0.05}, {"lr": 0.2, "patience": 2}]
    outcome = together(tmp_path / "array", points, train)
    assert outcome.engine.fused_steps > 0
    for number, point in enumerate(points):
        value, expected = outcome.value(str(number)), alone(tmp_path / str(number), **point).end.value
        assert (value["epochs"], value["best"]) == (expected["epochs"], expected["best"])
        assert torch.allclose(value["loaded"], expected["loaded"], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("disagree", [False, True])
def test_all_processes_decide_alike_though_their_values_differ(plain, tmp_path, crew: Crew, disagree) -> None:
    for outcome in crew.run(2, tmp_path, train, disagree=disagree):
        check(outcome, plain, within=1e-6)


@pytest.mark.smoke
@pytest.mark.slow
def test_processes_that_leave_and_join_know_the_best(plain, tmp_path, crew: Crew) -> None:
    steps = {3 * STEPS + 2: 1, 4 * STEPS + 2: 2}
    run = crew.start(2, tmp_path, train, hold_at=tuple(steps))
    for step, size in steps.items():
        held = tmp_path / "net" / "files" / f"held-{step}"
        run.until(lambda held=held: held.exists() or run.ended, 60)
        run.regroup(size)
    for outcome in run.outcomes():
        check(outcome, plain, within=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [2, 4])
def test_the_others_decide_when_one_is_killed_in_the_comparison(plain, tmp_path, crew: Crew, epoch) -> None:
    outcomes = [outcome for outcome in crew.start(3, tmp_path, train, die_in=epoch).outcomes() if outcome is not None]
    assert len(outcomes) == 2
    for outcome in outcomes:
        check(outcome, plain, within=1e-6)
