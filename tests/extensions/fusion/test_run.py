"""Whole training jobs in an array, compared with each training job alone."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from freetrain_parsl.errors import NonFiniteLoss
from freetrain_parsl.extensions.fusion.slot.array_mailbox import ArrayMailbox
from freetrain_parsl.extensions.fusion.slot.sizing import ArraySizing
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import PauseReason, Progress
from freetrain_parsl.training.checkpoints.manager import CheckpointManager
from freetrain_parsl.training.data.loader_options import LoaderOptions
from freetrain_parsl.training.mailbox import Paused
from tests.extensions.fusion.sweep_trainings import alone, classify, data, distance, member, together

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from freetrain_parsl.protocol.reports import Report

# Differences of rounding, of sums in another order, after 12 steps in float64. Adaptive optimizers amplify them where a
# gradient is zero but for rounding, as for biases before a normalization.
ROUNDING = 1e-10
AMPLIFIED = 1e-5


def assert_equal(one: Any, other: Any) -> None:
    for name, value in one.items():
        assert distance(value, other[name]) < (AMPLIFIED if name in ("model", "optimizer") else ROUNDING), name


def assert_as_alone(
    root: Path,
    points: Sequence[Mapping[str, Any]],
    *,
    seeds: Sequence[int] | None = None,
) -> None:
    outcome = together(root / "array", points, seeds=seeds)
    for number, point in enumerate(points):
        value = alone(root / "alone", str(number), point, seed=0 if seeds is None else seeds[number])
        assert_equal(outcome.value(str(number)), value)
    assert not outcome.engine.reason
    assert outcome.engine.fused_steps > 0


@pytest.mark.parametrize("kind", ["mlp", "cnn", "lstm", "transformer", "pointnet"])
@pytest.mark.parametrize(
    "seeds", [(4, 5, 6), pytest.param(None, marks=pytest.mark.slow)], ids=["own seeds", "one seed"]
)
def test_every_training_of_a_sweep_is_what_it_is_alone(tmp_path: Path, kind: str, seeds: Sequence[int] | None) -> None:
    """Losses, validation, parameters, buffers, optimizer states, and the random numbers drawn afterwards."""
    # Adam amplifies the rounding of the gradients of an attention's keys, which are zero, to whole steps.
    optimizer = "SGD" if kind == "transformer" else "Adam"
    points = [
        {
            "kind": kind,
            "optimizer": optimizer,
            "lr": 0.01 * (number + 1),
            "weight_decay": 0.01 * number,
            "dropout": 0.1 + 0.2 * number,
        }
        for number in range(3)
    ]
    assert_as_alone(tmp_path, points, seeds=seeds)


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5}),
    ("SGD", {"momentum": 0.9, "maximize": True}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True}),
    ("Adam", {"betas": (0.5, 0.9), "eps": 1e-3, "fused": True}),
    ("AdamW", {}),
    ("RMSprop", {}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
    ("Adagrad", {"initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    ("NAdam", {}),
    ("Adadelta", {}),
    ("Adamax", {}),
    ("RAdam", {}),
    ("ASGD", {}),
    ("Rprop", {}),
    ("Adafactor", {}),
]
QUICK = ("SGD", "Adam", "AdamW")


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [pytest.param(name, options, marks=[] if name in QUICK else pytest.mark.slow) for name, options in OPTIMIZERS],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)) or "plain",
)
def test_any_optimizer_makes_the_steps_that_it_makes_alone(
    tmp_path: Path, optimizer: str, options: Mapping[str, Any]
) -> None:
    decay = 0.0 if optimizer == "Rprop" else 0.01
    points = [
        {"optimizer": optimizer, "options": options, "lr": 0.01 * (number + 1), "weight_decay": number * decay}
        for number in range(3)
    ]
    assert_as_alone(tmp_path, points)


@pytest.mark.parametrize(
    "points",
    [
        pytest.param([{"clip": 0.1}, {"clip": 0.5}, {"clip": 100.0}], id="clipping"),
        pytest.param([{"schedule": 0}, {"schedule": 2}, {"schedule": 5}], id="schedulers"),
        pytest.param([{"penalty": 0.0}, {"penalty": 0.01}, {"penalty": 0.1}], id="a penalty on the parameters"),
        pytest.param([{"noise": 0.1}, {"noise": 0.3}], id="random numbers in the loop"),
        pytest.param([{"epochs": 1}, {"epochs": 3}, {"epochs": 2}], id="lengths"),
        pytest.param([{"optimizer": "RMSprop", "epochs": epochs} for epochs in (1, 3, 2)], id="lengths, RMSprop"),
        pytest.param(
            [{"optimizer": "SGD", "options": {"momentum": 0.9, "nesterov": nesterov}} for nesterov in (False, True)],
            id="with and without Nesterov's momentum",
        ),
        pytest.param(
            [{"optimizer": "SGD", "options": {"momentum": momentum, "dampening": 0.5}} for momentum in (0.0, 0.9)],
            id="with and without momentum",
        ),
    ],
)
def test_what_the_loop_does_for_one_training_is_done_for_that_one(
    tmp_path: Path, points: Sequence[Mapping[str, Any]]
) -> None:
    assert_as_alone(tmp_path / "one seed", points)
    assert_as_alone(tmp_path / "own seeds", points, seeds=range(len(points)))


def test_losses_agree_in_single_precision(tmp_path: Path) -> None:
    points = [{"kind": "mlp", "lr": 0.003 * (number + 1), "dtype": torch.float32} for number in range(4)]
    outcome = together(tmp_path / "array", points)
    for number, point in enumerate(points):
        value = alone(tmp_path / "alone", str(number), point)
        assert distance(outcome.value(str(number))["losses"], value["losses"]) < 1e-6


def test_trainings_that_stop_fail_or_diverge_leave_the_others_undisturbed(tmp_path: Path) -> None:
    points: list[dict[str, Any]] = [
        {"lr": 0.01},
        {"lr": 0.02, "fail_at": 5},
        {"lr": 1e200, "optimizer": "SGD"},
        {"lr": 0.03, "stop_above": 0.0},
        {"lr": 0.04},
    ]
    points = [{"optimizer": "SGD", **point} for point in points]
    outcome = together(tmp_path / "array", points)
    for number in (0, 3, 4):
        value = alone(tmp_path / "alone", str(number), points[number])
        assert_equal(outcome.value(str(number)), value)
    assert isinstance(outcome.ends["1"], ValueError)
    assert isinstance(outcome.ends["2"], NonFiniteLoss)
    assert len(outcome.value("3")["losses"]) == 4
    assert outcome.engine.fused_steps >= 12


def always(size: int) -> ArraySizing:
    """Return a sizing that fuses that many in any case."""
    return ArraySizing(size, size)


def test_trainings_follow_each_other_when_there_is_room_for_fewer(tmp_path: Path) -> None:
    points = [{"lr": 0.01 * (number + 1), "epochs": 1 + number % 3} for number in range(6)]
    outcome = together(tmp_path / "array", points, sizing=always(3))
    assert list(outcome.ends) != sorted(outcome.ends)  # shorter ones ended first
    for number, point in enumerate(points):
        value = alone(tmp_path / "alone", str(number), point)
        assert_equal(outcome.value(str(number)), value)


@pytest.mark.parametrize("later", ["alone", "in another array"])
def test_trainings_go_on_from_their_own_checkpoints_alone_or_in_another_array(tmp_path: Path, later: str) -> None:
    points = [{"kind": "cnn", "lr": 0.01 * (number + 1)} for number in range(3)]
    mailbox: ArrayMailbox = ArrayMailbox()
    steps = 0

    def interrupted(session: Any, **point: Any) -> Any:
        original = session.step

        def step(loss: Any = None, **options: Any) -> bool:
            nonlocal steps
            made = original(loss, **options)
            steps += made
            if steps >= 3 * 6:
                mailbox.end()
            return bool(made)

        session.step = step
        return classify(session, **point)

    first = together(tmp_path / "array", points, interrupted, mailbox=mailbox)
    assert all(isinstance(end, Paused) for end in first.ends.values())
    assert {end.progress.step for end in first.ends.values() if isinstance(end, Paused)} <= {6, 7}
    if later == "alone":
        values = {str(number): alone(tmp_path / "array", str(number), point) for number, point in enumerate(points)}
    else:
        outcome = together(tmp_path / "array", points)
        values = {str(number): outcome.value(str(number)) for number in range(3)}
        assert outcome.engine.fused_steps > 0
    for number, point in enumerate(points):
        whole = alone(tmp_path / "alone", str(number), point)
        assert_equal({what: values[str(number)][what] for what in ("metrics", "model", "optimizer")}, whole)


def test_a_checkpoint_holds_one_training_only(tmp_path: Path) -> None:
    points = [{"lr": 0.01 * (number + 1), "epochs": 1} for number in range(8)]
    together(tmp_path / "array", points)
    alone(tmp_path / "alone", "0", points[0])
    sizes = {
        root: sum(file.stat().st_size for file in (tmp_path / root / "0").rglob("*") if file.is_file())
        for root in ("array", "alone")
    }
    assert sizes["array"] < 1.1 * sizes["alone"]


def test_models_that_differ_train_one_by_one_and_the_reason_is_known(tmp_path: Path) -> None:
    points = [{"kind": "mlp"}, {"kind": "cnn"}]
    outcome = together(tmp_path / "array", points)
    assert outcome.engine.fused_steps == 0
    assert outcome.engine.reason
    for number, point in enumerate(points):
        assert_equal(outcome.value(str(number)), alone(tmp_path / "alone", str(number), point))


@pytest.mark.parametrize("clip", [None, 0.1])
def test_micro_batches_are_fused(tmp_path: Path, clip: float | None) -> None:
    """The last batch of an epoch has fewer."""
    points = [{"kind": "mlp", "lr": 0.01 * (n + 1), "micro_batch": 5, "clip": clip} for n in range(3)]
    assert_as_alone(tmp_path, points, seeds=(4, 5, 6))


def in_lengths(session: Any, *, length: int, lengths: int = 1) -> Any:
    """Train on sequences of a length, or of several in turns."""
    model, _ = session.prepare(nn.LSTM(2, 3, batch_first=True).double(), torch.optim.SGD, lr=0.1)
    batches = session.loader(data(), batch_size=4)
    for epoch in session.epochs(2):
        for number, (x, _) in enumerate(batches):
            steps = length + (epoch + number * length) % lengths
            session.step(model(x.view(len(x), -1, 2)[:, :steps])[0].square().mean())
    return {"model": {name: value.clone() for name, value in model.state_dict().items()}}


def test_calls_that_never_meet_have_a_reason_and_a_kind(tmp_path: Path) -> None:
    """Those of equal lengths have the same kind, by which the driver groups them."""
    points = [{"length": 5}, {"length": 7}, {"length": 5}]
    structures: dict[str, set[str]] = {}
    reasons: dict[str, set[str]] = {}

    def note(name: str, report: Any) -> None:
        if isinstance(report, Progress):
            structures.setdefault(name, set()).add(report.structure)
            reasons.setdefault(name, set()).add(report.not_fused)

    outcome = together(tmp_path / "array", points, in_lengths, on_report=note)
    assert outcome.engine.fused_steps == 0
    none, reason = sorted(reasons["0"])
    assert not none
    assert reason == (
        "argument 0 is a tensor of (4, 5, 2), float64, in one and a tensor of (4, 7, 2), float64, in another; calls "
        "with equal shapes are fused: use one batch size, and pad to one length"
    )
    assert structures["0"] == structures["2"]
    first, *kinds = sorted(structures["0"] | structures["1"])
    assert len(kinds) == 2
    assert all(kind.startswith(f"{first}/") for kind in kinds)
    for number, point in enumerate(points):
        expected = alone(tmp_path / "alone", str(number), point, in_lengths)
        assert distance(outcome.value(str(number)), expected) == 0.0


def test_some_calls_of_other_lengths_do_not_end_an_array(tmp_path: Path) -> None:
    """As of the last batch of an epoch: never many in a row."""
    points = [{"length": 4, "lengths": 3}, {"length": 5}]
    outcome = together(tmp_path / "array", points, in_lengths)
    assert outcome.engine.fused_steps > 0
    assert not outcome.engine.reason


def test_a_loop_that_changes_its_batch_changes_that_of_its_own_training_only(tmp_path: Path) -> None:
    def scaled(session: Any, factor: float) -> Any:
        samples = data()
        model, _ = session.prepare(nn.Linear(24, 4).double(), torch.optim.SGD, lr=0.1)
        batches = session.loader(samples, batch_size=16)
        for _ in session.epochs(2):
            for x, y in batches:
                x.mul_(factor)
                session.step(nn.functional.cross_entropy(model(x), y))
        return {name: value.clone() for name, value in model.state_dict().items()}

    points = [{"factor": 1.0}, {"factor": 2.0}, {"factor": 0.5}]
    outcome = together(tmp_path / "array", points, scaled)
    for number, point in enumerate(points):
        value = alone(tmp_path / "alone", str(number), point, scaled)
        assert_equal(outcome.value(str(number)), value)


@pytest.mark.parametrize("option", ["deterministic", "options", "batch_range", "scaler"])
def test_what_cannot_be_fused_trains_beside_the_others_as_it_does_alone(tmp_path: Path, option: str) -> None:
    def train(session: Any, *, option: str, lr: float) -> Any:
        scaler = [torch.amp.GradScaler("cpu", init_scale=4.0)] if option == "scaler" else []
        model, optimizer, *_ = session.prepare(nn.Linear(24, 4).double(), torch.optim.SGD, *scaler, lr=lr)
        values: dict[str, Any] = {"batch_range": (8, 32), "options": LoaderOptions(scaled=True)}
        given = {} if option in ("", "scaler") else {option: values.get(option, True)}
        batches = session.loader(data(), batch_size=16, **given)
        for _ in session.epochs(2):
            for x, y in batches:
                session.step(nn.functional.cross_entropy(model(x), y))
        return {"losses": session.metrics["loss"], "model": model.state_dict(), "optimizer": optimizer.state_dict()}

    points = [{"option": name, "lr": 0.1 * (number + 1)} for number, name in enumerate(("", option, ""))]
    outcome = together(tmp_path / "array", points, train)
    for number, point in enumerate(points):
        assert_equal(outcome.value(str(number)), alone(tmp_path / "alone", str(number), point, train))
    assert outcome.engine.fused_steps == 8


def test_a_hook_that_keeps_what_it_sees_is_not_fused(tmp_path: Path) -> None:
    def train(session: Any, *, lr: float) -> Any:
        seen: list[float] = []
        net = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 4)).double()
        net[0].register_forward_hook(lambda _module, _inputs, output: seen.append(output.detach().mean()))
        model, _ = session.prepare(net, torch.optim.SGD, lr=lr)
        batches = session.loader(data(), batch_size=16)
        for _ in session.epochs(1):
            for x, y in batches:
                session.step(nn.functional.cross_entropy(model(x), y))
        return {"losses": [float(value) for value in seen]}

    points = [{"lr": 0.1}, {"lr": 0.2}]
    outcome = together(tmp_path / "array", points, train)
    for number, point in enumerate(points):
        assert_equal(outcome.value(str(number)), alone(tmp_path / "alone", str(number), point, train))


def adversaries(session: Any, *, lr: float, fail: str = "", stop: int | None = None) -> Any:
    """Train a generator and a discriminator in turns; optionally fail at a place of the third step."""
    generator, discriminator = nn.Linear(4, 24).double(), nn.Linear(24, 1).double()
    generator, one, discriminator, two = session.prepare(
        generator,
        torch.optim.Adam(generator.parameters(), lr=lr),
        discriminator,
        torch.optim.SGD(discriminator.parameters(), lr=lr, momentum=0.9),
    )
    batches = session.loader(data(), batch_size=16)
    judge = nn.functional.binary_cross_entropy_with_logits
    losses: list[float] = []
    places: list[str] = []

    def reach(place: str) -> None:
        places.append(place)
        if place == fail and places.count(place) == 3:
            raise ValueError(place)

    for _ in session.epochs(2):
        for x, _ in batches:
            made = generator(torch.randn(len(x), 4, dtype=x.dtype))
            reach("made")
            real, false = discriminator(x), discriminator(made.detach())
            reach("judged")
            loss = judge(real, torch.ones_like(real)) + judge(false, torch.zeros_like(false))
            session.step(loss, optimizer=two)
            reach("stepped")
            verdict = discriminator(made)
            loss = judge(verdict, torch.ones_like(verdict))
            session.step(loss, optimizer=one)
            losses.append(loss.item())
            if stop == len(losses):
                return {"losses": losses}
    models = {"generator": generator.state_dict(), "discriminator": discriminator.state_dict()}
    return {"losses": losses, "model": models, "optimizer": [one.state_dict(), two.state_dict()]}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("fail", ["", "made", "judged", "stepped"])
def test_two_models_and_one_training_that_fails_anywhere_in_a_step(tmp_path: Path, fail: str, size: int) -> None:
    points: list[dict[str, Any]] = [{"lr": 0.05}, {"lr": 0.1, "fail": fail}, {"lr": 0.2}, {"lr": 0.3, "stop": 5}]
    points = points[:size]
    outcome = together(tmp_path / "array", points, adversaries)
    for number, point in enumerate(points):
        if point.get("fail"):
            assert isinstance(outcome.ends[str(number)], ValueError)
        else:
            assert_equal(outcome.value(str(number)), alone(tmp_path / "alone", str(number), point, adversaries))
    assert outcome.engine.fused_steps >= 4


def test_members_are_added_and_released_while_the_others_train(tmp_path: Path) -> None:
    """Each trains as it would alone; a released one can continue from its checkpoint."""
    mailbox: ArrayMailbox = ArrayMailbox()
    points = [{"lr": 0.01 * (number + 1), "epochs": 6} for number in range(3)]
    late = member(classify, SessionOptions("2", tmp_path / "array"), points[2])
    steps: Counter[str] = Counter()

    def on_report(name: str, report: Report) -> None:
        steps[name] += 1
        if name == "0" and steps["0"] == 1:
            mailbox.add(late)
        if name == "2" and steps["2"] == 1:
            mailbox.release("1")

    outcome = together(tmp_path / "array", points[:2], mailbox=mailbox, on_report=on_report)
    released = outcome.ends["1"]
    assert isinstance(released, Paused)
    assert released.reason is PauseReason.REQUESTED
    for number in (0, 2):
        value = alone(tmp_path / "alone", str(number), points[number])
        assert_equal(outcome.value(str(number)), value)
    resumed = alone(tmp_path / "array", "1", points[1])
    expected = alone(tmp_path / "alone", "1", points[1])
    assert distance(resumed["model"], expected["model"]) < AMPLIFIED


def test_a_member_joins_one_that_trains_alone(tmp_path: Path) -> None:
    mailbox: ArrayMailbox = ArrayMailbox()
    late = member(classify, SessionOptions("1", tmp_path / "array"), {"lr": 0.1, "epochs": 4})
    seen = []

    def on_report(name: str, report: Report) -> None:
        seen.append(name)
        if len(seen) == 1:
            mailbox.add(late)

    outcome = together(tmp_path / "array", [{"lr": 0.01, "epochs": 4}], mailbox=mailbox, on_report=on_report)
    assert outcome.engine.fused_steps > 0
    assert seen.index("1") < len(seen) - 1 - seen[::-1].index("0"), "it waited until the other had ended"
    for name, rate in (("0", 0.01), ("1", 0.1)):
        value = alone(tmp_path / "alone", name, {"lr": rate, "epochs": 4})
        assert_equal(outcome.value(name), value)


def test_members_that_are_released_before_they_begin_are_given_back(tmp_path: Path) -> None:
    mailbox: ArrayMailbox = ArrayMailbox()
    points = [{"lr": 0.01, "epochs": 2}, {"lr": 0.1, "epochs": 2}]

    def on_report(name: str, report: Report) -> None:
        mailbox.release("1")

    mailbox.of("1")
    outcome = together(tmp_path, points, mailbox=mailbox, on_report=on_report, sizing=ArraySizing(1))
    released = outcome.ends["1"]
    assert isinstance(released, Paused)
    assert released.reason is PauseReason.LEFT
    assert outcome.value("0")["losses"]


def test_the_mailbox_of_an_array_passes_on_when_the_node_closes() -> None:
    now = [0.0]
    mailbox: ArrayMailbox = ArrayMailbox(lambda: now[0])
    early = mailbox.of("early")
    mailbox.close_after(timedelta(seconds=30))
    now[0] = 10.0
    assert early.closes_in() == 20.0
    assert mailbox.of("late").closes_in() == 20.0
    mailbox.end()
    assert early.pause_requested.is_set()
    assert mailbox.of("later").pause_requested.is_set()


@pytest.mark.parametrize(("count", "pauses"), [(1, False), (2, True)])
def test_members_pause_early_enough_to_save_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, pauses: bool
) -> None:
    """Each takes three seconds to save, with a margin of two, and the node closes in seven: time for one of them."""
    monkeypatch.setattr(CheckpointManager, "write_seconds_estimate", 3.0)
    mailbox = ArrayMailbox()
    mailbox.close_after(timedelta(seconds=7))
    outcome = together(tmp_path, [{"lr": 0.01}, {"lr": 0.1}][:count], mailbox=mailbox)
    assert any(isinstance(end, Paused) for end in outcome.ends.values()) is pauses


def weigh_items(session: Any, *, lr: float, by_backward: bool = False) -> dict[str, Any]:
    """Train on a mean over some of the samples; let the first process decide, and sum, after each epoch."""
    torch.manual_seed(1)
    model, _ = session.prepare(nn.Linear(24, 4).double(), torch.optim.SGD, lr=lr)
    batches = session.loader(data(torch.float64), batch_size=16)
    shared = []
    for epoch in session.epochs(2):
        for x, y in batches:
            chosen = y > 0
            loss = nn.functional.cross_entropy(model(x), torch.where(chosen, y, -100))
            if by_backward:
                assert session.backward(loss, items=chosen.sum())
                assert session.step()
            else:
                assert session.step(loss, items=chosen.sum())
        shared += [session.broadcast(epoch), int(session.all_reduce(torch.tensor(7)))]
    return {"metrics": session.metrics, "model": model.weight.detach().clone(), "shared": shared}


@pytest.mark.parametrize("by_backward", [False, True])
def test_items_and_decisions_are_those_of_each_training_alone(tmp_path: Path, by_backward: bool) -> None:
    points = [{"lr": 0.1 * (number + 1), "by_backward": by_backward} for number in range(3)]
    outcome = together(tmp_path / "array", points, weigh_items)
    assert outcome.engine.fused_steps > 0
    for number, point in enumerate(points):
        assert_equal(outcome.value(str(number)), alone(tmp_path / "alone", str(number), point, weigh_items))
        assert outcome.value(str(number))["shared"] == [0, 7, 1, 7]
