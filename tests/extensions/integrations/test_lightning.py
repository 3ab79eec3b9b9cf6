"""Lightning's Trainer in a session trains as it does alone, wherever the session runs."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from held import resize
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from lightning_trainings import Data, FollowingTheLoss, KnowingItsLength, Net, fit, in_session, points
from training_crew import run_member

from freetrain_parsl.errors import UsageError
from freetrain_parsl.extensions.integrations.lightning import SessionStrategy
from freetrain_parsl.training.fragment import Finished, Membership, Paused
from tests.extensions.fusion.sweep_trainings import together

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Lightning's own, which differ between its versions
]

SIGNALS = signal.SIGTERM, signal.SIGUSR1
VARIANTS = {"plain": {}, "accumulated": {"accumulate": 4, "samples": 144}, "stopped": {"patience": 1, "epochs": 9}}


@pytest.fixture(params=VARIANTS, scope="module")
def variant(request) -> dict[str, Any]:
    return VARIANTS[request.param]


@pytest.fixture(scope="module")
def plain(variant, tmp_path_factory) -> dict[str, Any]:
    """Return the result of the plain Trainer; in a session, Lightning sees one batch for each step."""
    torch.set_num_threads(1)
    result = fit(tmp_path_factory.mktemp("plain"), **variant)
    per_epoch = result["steps"] // result["epoch"]
    result["calls"]["steps"] = [[step + 1, step % per_epoch] for step in range(result["steps"])]
    return result


def alone(root: Path, **settings) -> Any:
    outcome = run_member(in_session, settings, root=root, membership=Membership("net"))
    assert outcome.end is not None, outcome.error
    return outcome.end


def check(result: dict[str, Any], plain: dict[str, Any], *, within: float) -> None:
    """Compare weights, counters, callbacks and the best checkpoint's value; no sample is lost or seen twice."""
    assert float((result["weights"] - plain["weights"]).abs().max()) <= within
    for name in ("steps", "epoch", "calls"):
        assert result[name] == plain[name], name
    assert result["best"] == pytest.approx(plain["best"], abs=max(within, 1e-7))
    assert result["audit"] == (0, 0)
    assert len(result["history"]) == plain["epoch"]
    assert [round(row["val_loss"], 4) for row in result["history"]] == plain["calls"]["validated"]


def test_one_process_trains_as_without_a_session(variant, plain, tmp_path) -> None:
    end = alone(tmp_path, **variant)
    check(end.value, plain, within=1e-6 if variant.get("accumulate") else 0.0)
    assert end.value["best_path"].startswith(str(tmp_path))


@pytest.mark.parametrize("step", [7, 10])
def test_a_restart_in_mid_epoch_or_at_its_end_changes_nothing(variant, plain, tmp_path, step) -> None:
    assert isinstance(alone(tmp_path / "stopped", disturbances={"pause_at": step}, **variant), Paused)
    resumed = alone(tmp_path / "stopped", **variant)
    assert isinstance(resumed, Finished)
    check(resumed.value, plain, within=1e-6 if variant.get("accumulate") else 0.0)


def test_a_schedule_may_depend_on_the_number_of_steps(tmp_path) -> None:
    torch.set_num_threads(1)
    plain = fit(tmp_path / "plain", module=KnowingItsLength)
    assert isinstance(alone(tmp_path / "net", module=KnowingItsLength, disturbances={"pause_at": 7}), Paused)
    resumed = alone(tmp_path / "net", module=KnowingItsLength)
    torch.testing.assert_close(resumed.value["weights"], plain["weights"], rtol=0, atol=0)


def test_processes_leave_and_join_in_one_run(variant, plain, tmp_path, crew: Crew) -> None:
    run = crew.start(2, tmp_path, in_session, disturbances={"hold_at": (6, 14)}, **variant)
    resize(run, tmp_path, [(6, 1), (14, 2)])
    for outcome in run.outcomes():
        assert outcome is not None
        assert isinstance(outcome.end, Finished), outcome.error
        check(outcome.end.value, plain, within=1e-5)


def test_a_newcomer_in_mid_epoch_has_the_others_counters(variant, plain, tmp_path, crew: Crew) -> None:
    run = crew.start(1, tmp_path, in_session, disturbances={"hold_at": (6,)}, **variant)
    resize(run, tmp_path, [(6, 2)])
    outcomes = run.outcomes()
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome is not None
        assert isinstance(outcome.end, Finished), outcome.error
        check(outcome.end.value, plain, within=1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("disturbances", [{"die_at": 8}, {"die_agreeing": 8}], ids=["in a step", "in validation"])
def test_the_others_go_on_when_one_is_killed(variant, plain, tmp_path, crew: Crew, disturbances) -> None:
    outcome = crew.start(2, tmp_path, in_session, disturbances=disturbances, **variant).outcomes()[0]
    assert outcome is not None
    assert isinstance(outcome.end, Finished), outcome.error
    check(outcome.end.value, plain, within=1e-5)


def test_members_of_an_array_train_as_alone(tmp_path) -> None:
    """They are not fused: Lightning does not call a module by its forward."""
    points_ = [{"epochs": 2}, {"epochs": 3}]
    outcome = together(tmp_path / "array", points_, in_session)
    for number, point in enumerate(points_):
        value, expected = outcome.value(str(number)), alone(tmp_path / str(number), **point).value
        assert torch.equal(value["weights"], expected["weights"])
        assert value["calls"] == expected["calls"]


def test_processes_that_follow_a_training_loss_have_the_same_learning_rate(tmp_path, crew: Crew) -> None:
    """The loss of a process's part of the batch is another one in each process."""
    outcomes = crew.start(2, tmp_path, in_session, module=FollowingTheLoss).outcomes()
    one, other = (outcome.end.value["weights"] for outcome in outcomes)
    assert torch.equal(one, other)


def test_signals_are_for_the_slot_in_a_job_of_slurm_too(tmp_path, monkeypatch) -> None:
    """Lightning would end the training job at SIGTERM, and requeue the batch job at SIGUSR1."""
    of_a_job = {"NTASKS": "4", "NTASKS_PER_NODE": "1", "NNODES": "4", "JOB_NAME": "ft", "JOB_ID": "7", "PROCID": "2"}
    for name, value in of_a_job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    arrived = []

    class Signalled(Net):
        def training_step(self, batch, index):
            if index == 2 and not arrived:
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGUSR1)
            return super().training_step(batch, index)

    before = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in SIGNALS}
    try:
        assert alone(tmp_path, epochs=2, module=Signalled).value["steps"] == 20
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert arrived == list(SIGNALS)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Repeating(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class OwnBackward(Net):
    def backward(self, loss):
        (2 * loss).backward()


class OwnState(Net):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = 1


class Skipping(Net):
    def training_step(self, batch, index):
        return None if index == 2 else super().training_step(batch, index)


class SavingCallback(Callback):
    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["mine"] = 1


class SeveralLoaders(Data):
    def train_dataloader(self):
        return [super().train_dataloader(), super().train_dataloader()]


class OwnBatches(Data):
    def train_dataloader(self):
        data = points(20, 0)
        return torch.utils.data.DataLoader(data, batch_sampler=[[0, 1], [2, 3]])


class DroppingData(Data):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(points(30, 0), batch_size=self.batch_size, drop_last=True)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"module": Manual, "gradient_clip_val": None}, "Manual has manual optimization"),
        ({"module": Repeating}, "LBFGS"),
        ({"module": OwnBackward}, "OwnBackward.backward would not be called"),
        ({"module": OwnState}, "OwnState.on_save_checkpoint would not be called"),
        ({"callbacks": [SavingCallback()]}, "SavingCallback.on_save_checkpoint would not be called"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "the callback StochasticWeightAveraging"),
        ({"max_time": "00:00:10:00"}, "the callback Timer"),
        ({"epochs": -1}, "max_epochs"),
        ({"max_steps": 10}, "max_steps"),
        ({"limit_train_batches": 0.5}, "limit_train_batches"),
        ({"limit_train_batches": 3}, "limit_train_batches"),
        ({"overfit_batches": 2}, "overfit_batches"),
        ({"fast_dev_run": True}, "fast_dev_run"),
        ({"val_check_interval": 0.5}, "val_check_interval"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        ({"precision": "64-true"}, "precision='64-true'"),
        ({"data": SeveralLoaders}, "one training DataLoader"),
        ({"data": OwnBatches}, "batch_sampler"),
        ({"data": DroppingData, "accumulate": 4}, "of 7 batches in an epoch, the last 3 would be left out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_is_not_supported_is_refused_by_name_before_the_first_step(tmp_path, settings, why) -> None:
    outcome = run_member(in_session, settings, root=tmp_path, membership=Membership("net"))
    assert outcome.end is None
    assert re.match(f"UsageError: .*({why})", outcome.error), outcome.error
    assert "\n" not in outcome.error


def test_a_training_step_without_a_loss_is_an_error_of_one_line(tmp_path) -> None:
    outcome = run_member(in_session, {"module": Skipping}, root=tmp_path, membership=Membership("net"))
    assert outcome.error.startswith("UsageError: training_step returned no loss")


def test_another_version_is_refused_by_name(monkeypatch) -> None:
    monkeypatch.setattr("lightning.__version__", "3.0.1")
    with pytest.raises(UsageError, match=r"SessionStrategy works with lightning 2.4 to 2.6; installed is 3.0.1"):
        SessionStrategy(None)


def test_bfloat16_works(tmp_path) -> None:
    assert alone(tmp_path, precision="bf16-mixed", epochs=2).value["steps"] == 20
