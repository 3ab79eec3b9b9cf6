"""What users write around their batches: the same results after a pause and on any processes, or a refusal."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
import training_crew
from habits import HELD
from loop_trainings import prints_the_last_loss
from losses import SAMPLES, Net, flat, points
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import DataLoader, Dataset, Subset
from training_crew import run_member

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.fragment import Finished, Membership, Paused, run_local
from freetrain_parsl.training.group.decisions import Decisions
from freetrain_parsl.training.mailbox import ControlMailbox

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from crew import Crew

BATCHES = -(-SAMPLES // 8)


def prepared(session: Any, **options: Any) -> tuple[Net, torch.optim.Optimizer, Any]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    return model, optimizer, session.loader(Subset(points(), range(SAMPLES)), 8, **options)


def pause_after(session: Any, step: int | None) -> None:
    if session.metrics["steps"] == step:
        training_crew.NOTICE.pause_requested.set()


def close_after(session: Any, step: int | None) -> None:
    if session.metrics["steps"] == step:
        training_crew.NOTICE.close_after(timedelta(0))


def moved(function: Callable[..., Any], root: Path, stop: int) -> Any:
    """Return the result of a training job that is paused after a step, and resumed."""
    first = run_member(function, {"stop": stop}, root=root, membership=Membership("net"))
    assert isinstance(first.end, Paused), first.error
    second = run_member(function, {}, root=root, membership=Membership("net"))
    assert isinstance(second.end, Finished), second.error
    return second.end.value


class Levelled(Dataset[Any]):
    """Its samples depend on what the loop sets in each epoch."""

    level = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        x, y = points()[index]
        return x, int(y), self.level


def sets_a_level(session: Any, keeps: bool = False, stop: int | None = None) -> list[list[int]]:
    model = Net()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    samples = Levelled()
    data = session.loader(DataLoader(samples, 8, num_workers=1, persistent_workers=keeps))
    seen = session.state(levels=[])
    for epoch in session.epochs(3):
        samples.level = epoch
        levels = set()
        for x, y, level in data:
            levels |= set(level.tolist())
            session.step(cross_entropy(model(x), y))
            pause_after(session, stop)
        seen.levels.append(sorted(levels))
    return seen.levels


def test_workers_get_what_the_loop_changes_in_the_dataset_in_each_epoch(tmp_path: Path) -> None:
    assert run_local(sets_a_level) == [[0], [1], [2]]
    assert moved(sets_a_level, tmp_path, BATCHES + 2) == [[0], [1], [2]]
    assert run_local(sets_a_level, keeps=True) == [[0], [0], [0]], "as with torch's DataLoader"


def skips_batches(session: Any, skips: tuple[int, ...], micro_batch: int | None = None) -> torch.Tensor:
    """Skip the micro-batches with these numbers."""
    model, _, data = prepared(session, shuffle=False, micro_batch=micro_batch)
    number = 0
    for _ in session.epochs(1):
        for x, y in data:
            loss = cross_entropy(model(x), y)
            number += 1
            if number - 1 in skips:
                continue
            session.step(loss)
    return flat(model)


def test_gradients_of_a_batch_that_is_left_are_not_added_to_the_next_one() -> None:
    whole = run_local(skips_batches, skips=(1,))
    in_pieces = run_local(skips_batches, skips=(2, 3), micro_batch=4)
    torch.testing.assert_close(in_pieces, whole, rtol=0, atol=1e-12)
    left_at_its_last = run_local(skips_batches, skips=(3,), micro_batch=4)
    torch.testing.assert_close(left_at_its_last, whole, rtol=0, atol=1e-12)
    with pytest.raises(UsageError, match="not for an earlier one of the same batch"):
        run_local(skips_batches, skips=(2,), micro_batch=4)


def leaves_early(session: Any, after: int, micro_batch: int | None = None) -> tuple[torch.Tensor, float]:
    model, optimizer, data = prepared(session, shuffle=False, micro_batch=micro_batch)
    scheduler = ExponentialLR(optimizer, 0.5)
    session.prepare(scheduler)
    for _ in session.epochs(2):
        for number, (x, y) in enumerate(data, 1):
            session.step(cross_entropy(model(x), y))
            if number == after:
                break
        scheduler.step()
    return flat(model), optimizer.param_groups[0]["lr"]


def test_a_loop_that_is_left_within_a_batch_leaves_nothing_of_it() -> None:
    parameters, rate = run_local(leaves_early, after=5, micro_batch=4)
    expected, expected_rate = run_local(leaves_early, after=2)
    assert rate == expected_rate == 0.025
    torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)


def takes_first_pieces(session: Any) -> None:
    model, _, data = prepared(session, micro_batch=4)
    for _ in session.epochs(1):
        for _ in range(5):
            x, y = next(iter(data))
            session.step(cross_entropy(model(x), y))


def test_taking_the_first_micro_batch_again_and_again_is_refused() -> None:
    with pytest.raises(UsageError, match=r"not next\(iter\(data\)\), with micro_batch"):
        run_local(takes_first_pieces)


def prints_its_last_loss(session: Any, stop: int | None = None, closes: bool = False) -> float:
    model, _, data = prepared(session)
    for _ in session.epochs(3):
        for x, y in data:
            loss = cross_entropy(model(x), y)
            session.step(loss)
            (close_after if closes else pause_after)(session, stop)
        last = loss.item()
    return last


def averages_over_batches(session: Any, stop: int | None = None, closes: bool = False) -> float:
    model, _, data = prepared(session)
    for _ in session.epochs(3):
        batches = 0
        for x, y in data:
            session.step(cross_entropy(model(x), y))
            batches += 1
            (close_after if closes else pause_after)(session, stop)
        mean = 1 / batches
    return mean


@pytest.mark.parametrize("function", [prints_its_last_loss, averages_over_batches])
def test_a_pause_waits_for_the_code_after_the_batches_which_may_need_one(tmp_path: Path, function: Any) -> None:
    alone = run_local(function)
    for stop in (BATCHES - 1, BATCHES, 2 * BATCHES):
        assert moved(function, tmp_path / str(stop), stop) == alone


@pytest.mark.parametrize("function", [prints_its_last_loss, averages_over_batches])
def test_code_after_the_batches_that_needs_one_is_named_where_a_node_has_closed_before_it(
    tmp_path: Path, function: Any
) -> None:
    first = run_member(function, {"stop": BATCHES, "closes": True}, root=tmp_path, membership=Membership("net"))
    assert isinstance(first.end, Paused), first.error
    training_crew.NOTICE.close_after(None)
    second = run_member(function, {}, root=tmp_path, membership=Membership("net"))
    assert re.match(r"UsageError: .*, in the code after the batches of epoch 0: this process resumed", second.error)


def test_periodic_saves_wait_for_the_code_after_the_batches(tmp_path: Path) -> None:
    """So that no job resumes where this code has no batch."""

    def train(session: Any) -> None:
        model, _, data = prepared(session)
        for epoch in session.epochs(3):
            for x, y in data:
                session.step(cross_entropy(model(x), y))
            session.log(of=epoch)

    options = {"checkpoint_interval": timedelta(microseconds=1), "keep": 100}
    outcome = run_member(train, {}, root=tmp_path, membership=Membership("net"), **options)
    assert isinstance(outcome.end, Finished), outcome.error
    saved = [json.loads(file.read_text()) for file in tmp_path.rglob("manifest.json")]
    periodic = [(one["step"], one["epoch"]) for one in saved if one["reason"] == "periodic"]
    assert periodic
    assert all(step < BATCHES * (epoch + 1) for step, epoch in periodic), periodic


@pytest.mark.parametrize(
    ("ended", "pending", "tail", "seconds"),
    [
        (False, True, 50.0, 2.0),
        (True, True, 50.0, 50.0),
        (True, True, 0.1, 0.1),
        (True, True, None, 60.0),  # not known in the first epoch of a process
        (True, False, 50.0, 2.0),  # nothing has to be done before: the others may continue without this node
        (True, False, 0.1, 0.1),
        (True, False, None, 2.0),
    ],
)
def test_what_is_pending_does_not_wait_for_code_that_a_node_would_not_see_the_end_of(
    ended: bool, pending: bool, tail: float | None, seconds: float
) -> None:
    mailbox = ControlMailbox()
    if pending:
        mailbox.pause_requested.set()
    training: Any = Mock(mailbox=mailbox)
    training.state.cursor.pass_ended = ended
    training.reporter.pace.longest_step, training.reporter.pace.longest_tail = 2.0, tail
    assert Decisions(training)._until_next() == seconds


@pytest.mark.slow
def test_a_process_joins_after_the_code_that_follows_the_batches(crew: Crew, tmp_path: Path) -> None:
    """It would run this code without a batch."""
    alone = run_local(prints_the_last_loss)
    run = crew.start(2, tmp_path, prints_the_last_loss, hold_at=7)
    run.until(lambda: (tmp_path / "net" / "files" / HELD).exists() or run.ended)
    run.regroup(3)
    outcomes = run.outcomes()
    assert len(outcomes) == 3
    for outcome in outcomes:
        assert outcome is not None
        assert isinstance(outcome.end, Finished), outcome.error
        assert len(outcome.end.value) == len(alone)


class Warmup(LRScheduler):
    """As in many repositories: another scheduler follows it."""

    def __init__(self, optimizer: torch.optim.Optimizer, after: LRScheduler) -> None:
        self.after_scheduler = after
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [0.1 for _ in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "after": self.after_scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        self.after_scheduler.load_state_dict(state_dict["after"])


class Wrapper(torch.optim.Optimizer):
    """As that of a library: the groups are those of another optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults


def forgets(session: Any, which: str, stop: int | None = None) -> None:
    model, optimizer, data = prepared(session)
    decay = CosineAnnealingLR(optimizer, 90)
    others: Any = []
    if which == "another":
        others = [LinearLR(optimizer, 0.1, total_iters=50)]
        session.prepare(decay)
    elif which == "plateau":
        others = [ReduceLROnPlateau(optimizer)]
        session.prepare(decay)
    elif which == "none":
        session.prepare(SequentialLR(optimizer, [LinearLR(optimizer), decay], [3]), ReduceLROnPlateau(optimizer))
    elif which == "contained":
        session.prepare(Warmup(optimizer, decay))
    names = {"optimizer": optimizer, "last_epoch": 3, "num_bad_epochs": 2, "others": others}
    for _ in session.epochs(1):
        for x, y in data:
            session.step(cross_entropy(model(x), y))
    assert names


@pytest.mark.parametrize("which", ["another", "plateau"])
def test_a_further_scheduler_that_is_not_prepared_is_refused(which: str) -> None:
    with pytest.raises(UsageError, match="a learning-rate scheduler was made, but not given to the session"):
        run_local(forgets, which=which)


@pytest.mark.parametrize("which", ["none", "contained"])
def test_schedulers_that_are_parts_of_a_prepared_one_are_not_taken_for_forgotten(which: str) -> None:
    run_local(forgets, which=which)


def makes_an_optimizer_anew(session: Any, *, anew: bool) -> None:
    model = Net()
    model.block.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.last.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    data = session.loader(points(), 8)
    for epoch in session.epochs(2):
        probe = torch.nn.Linear(3, 3)
        torch.optim.SGD(probe.parameters(), lr=0.1)
        if epoch == 1:
            model.block.requires_grad_(requires_grad=True)
            if anew:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            else:
                Wrapper(optimizer).add_param_group({"params": model.block.parameters(), "lr": 0.01})
        for x, y in data:
            session.step(cross_entropy(model(x), y))


def test_an_optimizer_of_the_model_that_is_made_in_the_loop_is_refused() -> None:
    run_local(makes_an_optimizer_anew, anew=False)
    with pytest.raises(UsageError, match="SGD has got parameters of the prepared model in the loop"):
        run_local(makes_an_optimizer_anew, anew=True)
    torch.optim.SGD(Net().parameters(), lr=0.1)  # outside a job


def draws_before_the_batches(session: Any, stop: int | None = None) -> list[list[int]]:
    model, _, data = prepared(session)
    drawn = session.state(all=[], first=None)
    for _ in session.epochs(2):
        permutation = torch.randperm(6)
        for x, y in data:
            drawn.all.append(permutation.tolist())
            session.step(cross_entropy(model(x[:, permutation]), y))
            pause_after(session, stop)
        drawn.all.append(torch.randperm(9).tolist())
    return drawn.all


@pytest.mark.parametrize("stop", [2, BATCHES, BATCHES + 1])
def test_code_before_the_batches_draws_the_same_after_a_pause(tmp_path: Path, stop: int) -> None:
    assert moved(draws_before_the_batches, tmp_path, stop) == run_local(draws_before_the_batches)


def changes_the_rate_between_loops(session: Any, stop: int | None = None) -> float:
    model, optimizer, data = prepared(session)
    scheduler = ExponentialLR(optimizer, 0.5)
    session.prepare(scheduler)
    for epochs in (1, 4):
        if epochs == 4:
            optimizer.param_groups[0]["lr"] = 1.0
        for _ in session.epochs(epochs):
            if session.metrics["steps"] == stop:
                training_crew.NOTICE.pause_requested.set()
            for x, y in data:
                session.step(cross_entropy(model(x), y))
            scheduler.step()
            if session.metrics["steps"] == stop:
                training_crew.NOTICE.pause_requested.set()
    rate: float = optimizer.param_groups[0]["lr"]
    return rate


@pytest.mark.parametrize("stop", [BATCHES, 2 * BATCHES, 3 * BATCHES])
def test_code_between_two_loops_over_epochs_is_undone_where_it_has_run_before(tmp_path: Path, stop: int) -> None:
    assert run_local(changes_the_rate_between_loops) == 0.125
    assert moved(changes_the_rate_between_loops, tmp_path, stop) == 0.125


def schedules_by_length(session: Any, stop: int | None = None) -> int:
    model, optimizer, data = prepared(session, batch_range=(8, 32))
    total = 3 * len(data)
    session.prepare(LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total)))
    for _ in session.epochs(3):
        for x, y in data:
            session.step(cross_entropy(model(x), y))
            if session.metrics["steps"] == 2:
                training_crew.NOTICE.post_batch(32)
            pause_after(session, stop)
    return total


def test_the_length_of_the_data_before_the_loop_does_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    assert moved(schedules_by_length, tmp_path, 5) == 3 * BATCHES


def counts(session: Any, **options: Any) -> tuple[int, int]:
    model = Net()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = session.loader(DataLoader(points(), 8, shuffle=True), **options)
    first = None
    for _ in session.epochs(1):
        for x, y in data:
            first = x if first is None else first
            session.step(cross_entropy(model(x), y))
    assert first is not None
    return session.metrics["steps"], int(torch.equal(first, points()[:8][0]))


def test_options_beside_a_dataloader_replace_its_own() -> None:
    assert run_local(counts) == (BATCHES, 0)
    assert run_local(counts, drop_last=True) == (BATCHES - 1, 0)
    assert run_local(counts, shuffle=False) == (BATCHES, 1)


def masks(session: Any, micro_batch: int | None = None) -> torch.Tensor:
    """Take the mean over samples of which some are masked, so that some micro-batches have none."""
    model, _, data = prepared(session, shuffle=False, micro_batch=micro_batch)
    for _ in session.epochs(1):
        for x, y in data:
            mask = (y == 0).double()
            loss = (cross_entropy(model(x), y, reduction="none") * mask).sum() / mask.sum()
            session.step(loss, items=mask.sum())
    return flat(model)


def test_a_micro_batch_whose_samples_are_all_masked_adds_nothing() -> None:
    """Its own loss and gradients are 0/0."""
    torch.testing.assert_close(run_local(masks, micro_batch=1), run_local(masks), rtol=0, atol=1e-12)
