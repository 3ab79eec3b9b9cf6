"""Batches that change their size: every sample once per epoch, and the same result wherever the training job runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_regroup import Event, disturbed, parameters
from torch.nn.functional import cross_entropy
from training_crew import SAMPLES, Data, classify, lag, net, run_member

from freetrain_parsl.errors import UsageError
from freetrain_parsl.protocol.reports import GroupFailed
from freetrain_parsl.training.data.loader_options import LoaderOptions
from freetrain_parsl.training.fragment import Finished, Membership, run_local

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

EPOCHS = 3
RANGE = (2, 32)
LEAST_STEPS = EPOCHS * -(-SAMPLES // RANGE[1])


def alone(root: Path, **kwargs: Any) -> Finished:
    """Train in this process, with the sizes in `batches` after their steps."""
    kwargs = {"epochs": EPOCHS, "batch_range": RANGE, **kwargs}
    outcome = run_member(classify, kwargs, root=root, membership=Membership("net"), name="net")
    assert isinstance(outcome.end, Finished), outcome.error
    return outcome.end


def audited(end: Finished) -> tuple[int, int, int]:
    return end.progress.samples, end.progress.samples_lost, end.progress.duplicate_samples


WHOLE = (EPOCHS * SAMPLES, 0, 0)


@pytest.mark.parametrize("mode", [{}, {"micro_batch": 3}], ids=["default", "micro-batches"])
def test_a_batch_that_does_not_change_has_the_result_of_a_fixed_one(tmp_path: Path, mode: dict[str, Any]) -> None:
    """The measurement changes nothing; with micro-batches only the order of a sum."""
    elastic, fixed = alone(tmp_path / "a", **mode), alone(tmp_path / "b", batch_range=None, **mode)
    assert torch.allclose(parameters(elastic), parameters(fixed), atol=1e-6)
    assert mode or torch.equal(parameters(elastic), parameters(fixed))
    for row, expected in zip(elastic.value["history"], fixed.value["history"], strict=True):
        assert {name: row[name] for name in expected} == pytest.approx(expected)
        assert (row["batch"], row["rate"]) == (8, pytest.approx(0.02 * 0.7 ** row["epoch"]))


def test_a_change_takes_effect_at_the_next_boundary_and_is_in_the_history(tmp_path: Path) -> None:
    """Steps of 8 samples, then of 20: 2 · 8 + 20 + 17, 20 + 20 + 13, then 5 at a time."""
    end = alone(tmp_path, batches={2: 20, 7: 5}, options=LoaderOptions(ramp=1))
    assert audited(end) == WHOLE
    assert end.progress.step == 4 + 3 + 11
    history = end.value["history"]
    assert [row["batch"] for row in history] == [20, 20, 5]
    factors = [row["rate"] / (0.02 * 0.7 ** row["epoch"]) for row in history]
    assert factors == pytest.approx([(20 / 8) ** 0.5, (20 / 8) ** 0.5, (5 / 8) ** 0.5])


def test_no_batch_is_larger_than_the_dataset(tmp_path: Path) -> None:
    """The learning rate follows the batches that there are."""
    end = alone(tmp_path, batches={1: 10 * SAMPLES}, batch_range=(2, 100 * SAMPLES), options=LoaderOptions(ramp=1))
    assert audited(end) == WHOLE
    assert [row["batch"] for row in end.value["history"]] == [SAMPLES] * EPOCHS
    assert end.value["history"][-1]["rate"] == pytest.approx((SAMPLES / 8) ** 0.5 * 0.02 * 0.7 ** (EPOCHS - 1))
    assert end.progress.batch is not None
    assert end.progress.batch.most == SAMPLES


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batches=st.dictionaries(st.integers(1, 20), st.integers(1, 40), max_size=5),
    pauses=st.sets(st.integers(1, 12), max_size=2),
    mode=st.sampled_from([{}, {"micro_batch": 3}, {"shuffle": False}]),
)
def test_no_schedule_of_changes_and_restarts_loses_or_repeats_a_sample(
    tmp_path_factory: pytest.TempPathFactory, batches: dict[int, int], pauses: set[int], mode: dict[str, Any]
) -> None:
    """The result with restarts is that without, bit by bit."""
    root = tmp_path_factory.mktemp("changes")
    whole = alone(root / "whole", batches=batches, **mode)
    kwargs: dict[str, Any] = {"epochs": EPOCHS, "batch_range": RANGE, "batches": batches, **mode}
    for step in sorted(pauses):
        run_member(classify, {**kwargs, "pause_after": step}, root=root / "cut", membership=Membership("net"))
    cut = alone(root / "cut", batches=batches, **mode)
    assert audited(cut) == audited(whole) == WHOLE
    assert torch.equal(parameters(cut), parameters(whole))
    assert cut.value == whole.value
    # Not the noise: a gradient that is to be compared with the next one is not saved.
    assert cut.progress.batch is not None
    assert whole.progress.batch is not None
    assert cut.progress.batch.size == whole.progress.batch.size


def test_the_range_may_change_between_two_runs(tmp_path: Path) -> None:
    kwargs = {"epochs": EPOCHS, "batch_range": RANGE, "batches": {1: 32}, "pause_after": 3}
    run_member(classify, kwargs, root=tmp_path, membership=Membership("net"))
    end = alone(tmp_path, batch_range=(4, 16))
    assert audited(end) == WHOLE
    assert [row["batch"] for row in end.value["history"]][1:] == [16, 16]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_range": (9, 32)}, r"batch_range 9 to 32 must contain batch_size \(8\)"),
        ({"batch_range": (8, 4)}, r"batch_range 8 to 4 must contain batch_size \(8\)"),
        ({"batch_range": 32}, r"batch_range is a pair such as \(64, 4096\), got 32"),
        ({"batch_range": (0, 32)}, "smallest batch must be at least 1, got 0"),
        ({"batch_range": (8, 32.5)}, "largest batch must be a whole number, got 32.5"),
        ({"batch_range": (8, 32), "deterministic": True}, "cannot be combined with deterministic=True: the results"),
        (
            {"batch_range": (8, 32), "options": LoaderOptions(scaled=True)},
            "cannot be combined with scaled=True: both decide",
        ),
        ({"batch_range": (8, 32), "drop_last": True}, "cannot be combined with drop_last=True: the dropped"),
        ({"options": LoaderOptions(lr_scaling="sqrt")}, "lr_scaling needs batch_range"),
        ({"options": LoaderOptions(lr_scaling="adascale", scaled=True)}, "'adascale' needs batch_range"),
        ({"options": LoaderOptions(lr_scaling="cubic"), "batch_range": (8, 32)}, "lr_scaling is 'cubic'; it is one of"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    def train(session: Any) -> None:
        session.prepare(net(), torch.optim.SGD, lr=0.1)
        session.loader(Data(), 8, **options)

    with pytest.raises(UsageError, match=message) as caught:
        run_local(train)
    assert "\n" not in str(caught.value)


def test_a_batch_with_a_step_done_keeps_its_samples() -> None:
    """Two optimizers take turns in each batch; a size that arrives between their steps waits for the next batch."""
    sizes = []

    def train(session: Any) -> Any:
        one, other = net(), net()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, other)]
        session.prepare(one, optimizers[0], other, optimizers[1])
        data = session.loader(Data(), 8, batch_range=(8, 16))
        for _ in session.epochs(1):
            for x, y in data:
                sizes.append(len(x))
                session.step(cross_entropy(one(x), y), optimizer=optimizers[0])
                session._runtime.mailbox.post_batch(16)
                session.step(cross_entropy(other(x), y), optimizer=optimizers[1])
        return session.audit

    audit = run_local(train)
    assert (audit.samples_lost, audit.duplicate_samples) == (0, 0)
    assert sizes == [8, 16, 16, 13]


# ── several processes ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.smoke
@pytest.mark.slow
def test_members_come_go_and_die_while_the_batch_changes(crew: Crew, tmp_path: Path) -> None:
    """2 -> 1 -> 2 -> one of them killed, with a change of the batch before and after each."""
    batches = {1: 12, 3: 5, 9: 16, 13: 3, 20: 20}
    events = (Event(2, "regroup", 1), Event(5, "regroup", 2), Event(11, "kill", 0))
    end = disturbed(crew, tmp_path, 2, events, batches=batches, batch_range=RANGE)
    whole = alone(tmp_path / "whole", batches=batches)
    assert audited(end) == WHOLE
    assert end.progress.step == whole.progress.step
    assert end.progress.resumed_from is None
    assert torch.allclose(parameters(end), parameters(whole), atol=1e-4)
    for row, expected in zip(end.value["history"], whole.value["history"], strict=True):
        assert row == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # an example takes seconds, so shrinking is too slow
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    size=st.integers(1, 3),
    batches=st.dictionaries(st.integers(1, 10), st.integers(2, 32), min_size=1, max_size=4),
    events=st.lists(
        st.tuples(st.integers(1, LEAST_STEPS - 1), st.sampled_from(["regroup", "kill", "restart"]), st.integers(1, 3)),
        min_size=1,
        max_size=3,
        unique_by=lambda event: event[0],
    ),
)
def test_no_schedule_of_changes_and_disturbances_loses_or_repeats_a_sample(
    crew: Crew,
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    batches: dict[int, int],
    events: list[tuple[int, str, int]],
) -> None:
    root = tmp_path_factory.mktemp("schedule")
    end = disturbed(crew, root, size, [Event(*event) for event in events], batches=batches, batch_range=RANGE)
    whole = alone(root / "whole", batches=batches)
    assert audited(end) == WHOLE
    assert end.progress.step == whole.progress.step
    assert torch.allclose(parameters(end), parameters(whole), atol=1e-4)


@pytest.mark.slow
def test_who_is_a_step_behind_gets_the_batch_of_who_is_ahead(crew: Crew, tmp_path: Path) -> None:
    """One member received the sum of the gradients, the other an error; the batch changes at the same boundary."""
    batches = {3: 16, 4: 6}
    run = crew.start(2, tmp_path / "cut", lag, at=3, epochs=EPOCHS, batches=batches, batch_range=RANGE)
    run.until(lambda: all(member.last(GroupFailed) for member in run.members))
    run.order(run.members, [], abort=True)
    outcome = run.outcomes()[0]
    assert outcome is not None
    assert isinstance(outcome.end, Finished), outcome.error
    assert audited(outcome.end) == WHOLE


@pytest.mark.slow
def test_the_noise_is_handed_over(crew: Crew, tmp_path: Path) -> None:
    """2 -> 1 -> 2 processes and a restart: measurements continue, and the estimate is that of one process."""
    kwargs = {"samples": 400, "epochs": 4, "batch_size": 8, "batch_range": RANGE}
    end = disturbed(
        crew, tmp_path, 2, (Event(60, "regroup", 1), Event(90, "regroup", 2), Event(120, "restart", 2)), **kwargs
    )
    whole = alone(tmp_path / "whole", **kwargs, micro_batch=4)
    assert end.progress.batch is not None
    assert whole.progress.batch is not None
    assert end.progress.resumed_from is not None
    state = torch.load(end.checkpoint / "state.pt", weights_only=True)["batch"]["noise"]  # type: ignore[operator]
    assert state["batches"] == 200
    assert end.progress.batch.variance == pytest.approx(whole.progress.batch.variance, rel=0.5)
