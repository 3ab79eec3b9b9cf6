"""The result of a training job does not depend on the number of processes, nor on when that number changes."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

import pytest
import sharing
import torch
from crew import Crew
from habits import HELD
from training_crew import SAMPLES, run_member

from freetrain_parsl.training.data.audit import Audit
from freetrain_parsl.training.data.loader_options import LoaderOptions
from freetrain_parsl.training.fragment import Finished, Membership, run_local
from freetrain_parsl.training.step.learning_rate import RateScaling

if TYPE_CHECKING:
    from pathlib import Path

    from training_crew import Outcome

pytestmark = pytest.mark.slow


def state(outcome: Outcome | None) -> dict[str, torch.Tensor]:
    """Return parameters and buffers at the end."""
    assert outcome is not None
    assert isinstance(outcome.end, Finished), outcome.error
    assert outcome.end.checkpoint is not None
    model: dict[str, torch.Tensor] = torch.load(outcome.end.checkpoint / "state.pt", weights_only=True)["objects"][
        "model"
    ]
    return model


def alone(root: Path, **kwargs: Any) -> Outcome:
    return run_member(sharing.train, kwargs, root=root / "alone", membership=Membership("net"))


def changing(crew: Crew, root: Path, size: int, function: Any = sharing.train, **kwargs: Any) -> Outcome:
    """Run on two processes, and on `size` from the fourth step on."""
    run = crew.start(2, root / "crew", function, hold_at=4, **kwargs)
    run.until(lambda: (root / "crew" / "net" / "files" / HELD).exists() or run.ended)
    run.regroup(size)
    outcome = run.outcomes()[0]
    assert outcome is not None
    assert isinstance(outcome.end, Finished), outcome.error
    return outcome


def farthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


# BatchNorm needs two samples in each shard, so there is no last batch of five.
DETERMINISTIC = {"kind": "normed", "deterministic": True, "options": LoaderOptions(shards=3), "drop_last": True}


@pytest.mark.parametrize("options", [{}, {"micro_batch": 2}], ids=["whole", "micro-batches"])
@pytest.mark.parametrize("size", [3, 1])
def test_deterministic_trainings_have_the_same_bits(
    crew: Crew, tmp_path: Path, size: int, options: dict[str, Any]
) -> None:
    """Parameters, running statistics and losses, with dropout, augmentation and BatchNorm."""
    undisturbed = alone(tmp_path, **DETERMINISTIC, **options)
    changed = changing(crew, tmp_path, size, **DETERMINISTIC, **options)
    expected, got = state(undisturbed), state(changed)
    assert {name for name in expected if not torch.equal(expected[name], got[name])} == set()
    assert expected["1.running_mean"].abs().sum() > 0
    assert changed.end.value["metrics"] == undisturbed.end.value["metrics"]


def test_deterministic_trainings_differ_with_the_number_of_shards(tmp_path: Path) -> None:
    """Otherwise the bitwise equality of the test above would be trivial."""
    three = alone(tmp_path / "3", **DETERMINISTIC)
    four = alone(tmp_path / "4", **{**DETERMINISTIC, "options": LoaderOptions(shards=4)})
    assert farthest(state(three), state(four)) > 1e-4


@pytest.mark.parametrize("size", [3, 1])
@pytest.mark.parametrize("batch_size", [12, 7, 2])
def test_uneven_parts_count_as_they_should(crew: Crew, tmp_path: Path, size: int, batch_size: int) -> None:
    """Batches that do not divide evenly among two or three processes, in micro-batches; samples are augmented."""
    options = {"batch_size": batch_size, "micro_batch": 2, "epochs": 1}
    undisturbed = alone(tmp_path, **options)
    changed = changing(crew, tmp_path, size, **options)
    assert farthest(state(undisturbed), state(changed)) < 1e-4
    assert changed.end.value["audit"] == Audit(SAMPLES, 0, 0)
    assert changed.end.value["metrics"]["loss"] == pytest.approx(undisturbed.end.value["metrics"]["loss"], abs=1e-5)


@pytest.mark.smoke
def test_parameters_that_only_some_samples_use_are_trained_alike(crew: Crew, tmp_path: Path) -> None:
    """No flag is needed; parameters that are never used do not change."""
    undisturbed = alone(tmp_path, kind="branches")
    changed = changing(crew, tmp_path, 3, kind="branches")
    expected, got = state(undisturbed), state(changed)
    assert farthest(expected, got) < 1e-4
    torch.manual_seed(0)
    assert torch.equal(got["never.weight"], sharing.network("branches").state_dict()["never.weight"])


def test_running_statistics_are_the_mean_over_the_processes(crew: Crew, tmp_path: Path) -> None:
    """Two processes normalize over half of each batch, with the same result as two shards on one process."""
    outcomes = crew.run(2, tmp_path, sharing.train, kind="normed", epochs=1)
    shares = alone(tmp_path, kind="normed", epochs=1, deterministic=True, options=LoaderOptions(shards=2))
    halves = state(outcomes[0])
    assert halves["1.running_mean"].abs().sum() > 0
    assert farthest(halves, state(shares)) < 1e-4


def test_augmentation_is_the_same_whoever_fetches(tmp_path: Path) -> None:
    """With this process or with two workers, the result is bitwise equal."""
    here = run_local(sharing.train, epochs=1, directory=tmp_path / "0")
    there = run_local(sharing.train, epochs=1, num_workers=2, directory=tmp_path / "2")
    assert here["metrics"] == there["metrics"]


def test_data_workers_stay_when_the_group_changes(tmp_path: Path) -> None:
    """The same workers continue, prefetched samples are dropped, and no sample is lost or repeated."""
    crew = Crew(multiprocessing.get_context("spawn"))  # else each member has a server for its data workers, which stays
    try:
        changed = changing(crew, tmp_path, 1, sharing.fetch, workers=2)
    finally:
        crew.close()
    value = changed.end.value
    assert value["workers"][2] == value["workers"][1] != set()
    assert value["audit"] == Audit(2 * SAMPLES, 0, 0)
    after = [positions for (_, size), positions in zip(value["sizes"], value["seen"], strict=True) if size == 1]
    second = [position for positions in after[-7:] for position in positions]
    assert sorted(second) == list(range(SAMPLES))


def test_scaled_batches_grow_with_the_processes_and_the_learning_rate_follows(crew: Crew, tmp_path: Path) -> None:
    changed = changing(crew, tmp_path, 3, sharing.scale)
    value = changed.end.value
    assert value["audit"] == Audit(2 * SAMPLES, 0, 0)
    assert value["rates"][:4] == pytest.approx([0.15, 0.2, 0.2, 0.2])
    assert value["rates"][4:7] == pytest.approx([0.25, 0.3, 0.3])
    assert value["left"] == 0.1


def test_a_ramp_takes_its_steps_and_leaves_the_rates_alone() -> None:
    """Schedulers see the unscaled rates."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scaling = RateScaling("linear", ramp=4)
    scaling.aim(3)
    seen = []
    for step in range(6):
        if step == 5:
            scaling.aim(1)
        with scaling.applied([optimizer]):
            seen.append(optimizer.param_groups[0]["lr"])
        assert optimizer.param_groups[0]["lr"] == 0.1
    assert seen == pytest.approx([0.15, 0.2, 0.25, 0.3, 0.3, 0.25])
