"""Hugging Face's Trainer in a session has the result of ``trainer.train()``, whatever happens to the processes."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import hf_trainings
import pytest
import torch
import transformers
from disturbances import ROUNDING, alone, assert_weights, distance, killed, regrouped, restarted
from hf_trainings import InOrder, in_session, make, summary
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from freetrain_parsl.errors import UsageError
from freetrain_parsl.extensions.integrations.huggingface import fit
from freetrain_parsl.training.fragment import run_local
from tests.extensions.fusion.sweep_trainings import together

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

pytestmark = [
    pytest.mark.slow,  # transformers takes seconds to import
    pytest.mark.filterwarnings("default"),  # third-party code has its own deprecations
]

CASES: dict[str, dict[str, Any]] = {
    "classifier": {},
    "language": {"language": True},
    "accumulated": {"language": True, "accumulate": 4},
    "stopped early": {"patience": 2, "num_train_epochs": 8},
    "by epochs": {"max_steps": 13, "eval_strategy": "epoch", "save_strategy": "epoch"},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau"},
    "best": {"save_strategy": "best", "eval_on_start": True},
    "without evaluation": {"eval_strategy": "no", "load_best_model_at_end": False, "dataloader_drop_last": True},
    "in bfloat16": {"bf16": True, "gradient_checkpointing": True},
}


def plain(root: Path, **options: Any) -> dict[str, Any]:
    trainer = make(root, **options)
    return summary(trainer, trainer.train())


def assert_same_record(one: dict[str, Any], other: dict[str, Any], within: float = 1e-4) -> None:
    """Compare steps, events and logs, except for the times."""
    for name in ("steps", "called", "counts", "epoch"):
        assert one[name] == other[name], name
    assert one["best"] == pytest.approx(other["best"], abs=within)
    assert one["loss"] == pytest.approx(other["loss"], abs=within)
    assert len(one["log"]) == len(other["log"])
    for row, expected in zip(one["log"][:-1], other["log"][:-1], strict=True):
        assert row.keys() == expected.keys()
        for name, number in expected.items():
            if not name.endswith(("runtime", "_per_second")):
                assert row[name] == pytest.approx(number, abs=within), name


@pytest.mark.parametrize("case", CASES)
def test_one_process_has_the_result_of_the_plain_trainer(tmp_path: Path, case: str) -> None:
    """The same weights bit by bit, except where micro-batches are summed in another way."""
    options = CASES[case]
    if case == "best" and transformers.__version__.startswith("4."):
        pytest.skip('before version 5 the Trainer does not load the best model with save_strategy="best"')
    expected, value = plain(tmp_path, **options), run_local(in_session, **options)
    assert_weights(value, expected, 0.0 if options.get("accumulate", 1) == 1 else 1e-5)
    if case == "accumulated":  # the plain Trainer counts epochs in micro-batches, of which the last are fewer
        expected["log"] = [
            {**row, "epoch": own["epoch"]} for row, own in zip(expected["log"], value["log"], strict=True)
        ]
    assert_same_record(value, expected)
    assert (value["audit"].samples_lost, value["audit"].duplicate_samples) == (0, 0)


@pytest.mark.parametrize("case", ["classifier", "accumulated", "stopped early"])
def test_a_restart_in_the_middle_of_an_epoch_changes_nothing(tmp_path: Path, case: str) -> None:
    options = CASES[case]
    whole = alone(in_session, tmp_path / "whole", **options)
    value = restarted(in_session, tmp_path / "cut", 7, **options)
    assert distance(value, whole) == 0.0
    assert_same_record(value, whole, 1e-12)
    assert value["history"] == whole["history"]


@pytest.mark.parametrize("case", ["classifier", "accumulated", "stopped early"])
def test_processes_leave_and_join_in_one_run(crew: Crew, tmp_path: Path, case: str) -> None:
    """2 -> 1 -> 2; the process that has joined knows what the Trainer knew."""
    options = CASES[case]
    whole = alone(in_session, tmp_path / "whole", **options)
    for value in regrouped(crew, in_session, tmp_path / "cut", (2, 1, 2), **options):
        assert_weights(value, whole)
        assert_same_record(value, whole)


@pytest.mark.smoke
@pytest.mark.parametrize("case", ["language", "accumulated"])
def test_a_process_that_dies_changes_nothing(crew: Crew, tmp_path: Path, case: str) -> None:
    whole = alone(in_session, tmp_path / "whole", **CASES[case])
    value = killed(crew, in_session, tmp_path / "cut", 7, **CASES[case])
    assert_weights(value, whole)
    assert_same_record(value, whole)


@pytest.mark.parametrize("case", ["classifier", "language", "stopped early"])
def test_members_of_an_array_are_fused(tmp_path: Path, case: str) -> None:
    """The Trainer scales the loss in place."""
    points = [{**CASES[case], "learning_rate": rate} for rate in (5e-3, 2e-3, 1e-3)]
    outcome = together(tmp_path / "array", points, in_session)
    assert outcome.engine.fused_steps > 0
    assert not outcome.engine.reason
    for number, point in enumerate(points):
        expected = alone(in_session, tmp_path / "alone" / str(number), **point)
        assert_weights(outcome.value(str(number)), expected, 1e-5)
        assert_same_record(outcome.value(str(number)), expected)


def test_values_go_to_the_trackers_and_into_the_history() -> None:
    history = run_local(in_session)["history"]
    assert [row["epoch"] for row in history] == [0, 1, 2]
    assert "eval_accuracy" in history[0]
    assert history[0]["loss"] == pytest.approx(1.03, abs=0.05)


def test_the_trainer_is_as_before_afterwards(tmp_path: Path) -> None:
    """It can be evaluated, its arguments can be pickled, and it trains without a session again."""

    def train(session: Any) -> None:
        trainer = make(tmp_path)
        before = {name: value for name, value in vars(trainer).items() if callable(value)}.keys()
        kind = type(trainer.args)
        fit(session, trainer)
        assert type(trainer.args) is kind
        assert {name: value for name, value in vars(trainer).items() if callable(value)}.keys() == before
        assert trainer.evaluate()["eval_loss"] > 0
        assert pickle.loads(pickle.dumps(trainer.args)).learning_rate == 5e-3
        assert "backward" not in vars(trainer.accelerator)

    run_local(train)


def test_a_model_can_be_saved_while_it_trains(tmp_path: Path) -> None:
    """With the Trainer's arguments, as ``save_model`` does."""

    class Saving(TrainerCallback):
        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            trainer.save_model(str(tmp_path / "saved"))

    def train(session: Any) -> None:
        trainer.add_callback(Saving())
        fit(session, trainer)

    trainer = make(tmp_path)
    run_local(train)
    assert (tmp_path / "saved" / "model.safetensors").exists()
    saved = torch.load(tmp_path / "saved" / "training_args.bin", weights_only=False)
    assert (type(saved), saved.learning_rate) == (type(trainer.args), 5e-3)


def refused(root: Path, **options: Any) -> str:
    def train(session: Any) -> None:
        trainer = make(root, **options)
        fit(session, trainer)

    with pytest.raises(UsageError) as caught:
        run_local(train)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume_from_checkpoint": "x"}, "TrainingArguments(resume_from_checkpoint='x') cannot be combined"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"neftune_noise_alpha": 0.1}, "neftune_noise_alpha=0.1"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear"}, "steps in the backward pass"),
    ],
)
def test_arguments_that_cannot_be_combined_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    assert message in refused(tmp_path, **options)


def test_a_checkpoint_given_to_train_is_refused(tmp_path: Path) -> None:
    class Resuming(InOrder):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            return super().train(resume_from_checkpoint=str(tmp_path), **kwargs)

        def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None: ...

    (tmp_path / "trainer_state.json").write_text("{}")
    assert "the session resumes from its own checkpoints" in refused(tmp_path, kind=Resuming)


def test_a_loop_of_the_users_own_is_refused(tmp_path: Path) -> None:
    class OwnLoop(InOrder):
        def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None: ...

    assert "OwnLoop overrides _maybe_log_save_evaluate" in refused(tmp_path, kind=OwnLoop)


def test_a_stream_is_refused(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    assert "a Stream without a length" in refused(tmp_path, dataset=Stream(), max_steps=5, kind=Trainer)


def test_samples_of_similar_length_share_a_batch(tmp_path: Path) -> None:
    """The Trainer's own sampler, in the session's order."""
    seen: list[int] = []

    class Recording(Trainer):
        def _get_train_sampler(self, *_args: Any) -> Any:
            """Return what group_by_length means for rows that are not padded yet."""
            lengths = self.train_dataset.lengths.tolist()  # type: ignore[union-attr]  # ours
            return LengthGroupedSampler(4, lengths=lengths)

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.extend(inputs["attention_mask"].sum(1).tolist())
            return super().training_step(model, inputs, *args, **kwargs)

    audit = run_local(in_session, kind=Recording, num_train_epochs=1, per_device_train_batch_size=4)["audit"]
    assert audit.samples_seen == hf_trainings.SAMPLES
    ranges = [max(seen[begin : begin + 4]) - min(seen[begin : begin + 4]) for begin in range(0, 72, 4)]
    assert sum(ranges) / len(ranges) < 3, "at random: 5"


@pytest.mark.parametrize("kind", ["dataset", "sft"])
def test_datasets_and_trl_work_unchanged(crew: Crew, tmp_path: Path, kind: str) -> None:
    """``datasets.Dataset``, and TRL's SFTTrainer: as plain, and 2 -> 1 -> 2."""
    pytest.importorskip("datasets")
    if kind == "sft":
        pytest.importorskip("trl")
    function = {"dataset": hf_trainings.with_dataset, "sft": hf_trainings.with_sft}[kind]
    expected = hf_trainings.plain_of(kind, tmp_path / "plain")
    assert_weights(alone(function, tmp_path / "alone"), expected, 0.0 if kind == "dataset" else ROUNDING)
    for value in regrouped(crew, function, tmp_path / "cut", (2, 1, 2)):
        assert_weights(value, expected)
        assert value["steps"] == expected["steps"]


def test_a_callback_that_stops_an_epoch_goes_on_with_the_next(tmp_path: Path) -> None:
    class Short(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_epoch_stop = state.global_step % 5 == 2
            return control

    def train(session: Any) -> Any:
        trainer = make(tmp_path, eval_strategy="no", load_best_model_at_end=False)
        trainer.add_callback(Short())
        return summary(trainer, fit(session, trainer))

    trainer = make(tmp_path / "plain", eval_strategy="no", load_best_model_at_end=False)
    trainer.add_callback(Short())
    expected = summary(trainer, trainer.train())
    assert_weights(value := run_local(train), expected, 0.0)
    assert value["steps"] == expected["steps"]


class OwnLoader(InOrder):
    """Its DataLoader has another batch size than the arguments, and leaves out incomplete batches."""

    def get_train_dataloader(self) -> Any:
        data: Any = self.train_dataset
        return torch.utils.data.DataLoader(data, 10, collate_fn=self.data_collator, drop_last=True)


def test_a_dataloader_of_the_users_own_keeps_its_batches(tmp_path: Path) -> None:
    """Their number determines the learning rates."""
    expected, value = plain(tmp_path, kind=OwnLoader), run_local(in_session, kind=OwnLoader)
    assert_weights(value, expected, 0.0)
    assert_same_record(value, expected)


def test_batches_that_only_a_session_would_leave_out_are_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, accumulate=4, dataloader_drop_last=True)
    assert "of 18 batches in an epoch, the last 2 would be left out" in message


def test_a_training_step_with_a_backward_pass_of_its_own_is_refused(tmp_path: Path) -> None:
    class OwnBackward(InOrder):
        def training_step(self, model: Any, inputs: Any, *_args: Any) -> Any:
            loss = self.compute_loss(model, inputs)
            loss.backward()
            return loss.detach()

    assert "OwnBackward.training_step did not call self.accelerator.backward" in refused(tmp_path, kind=OwnBackward)
