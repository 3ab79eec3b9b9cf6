"""A script for Accelerate with three changed lines has the unchanged one's result, whatever happens to processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import accelerate
import pytest
import torch
from accelerate_trainings import SAMPLES_USED, in_session, script
from disturbances import alone, assert_weights, distance, killed, regrouped, restarted
from torch.utils.data import DataLoader

from freetrain_parsl.errors import UsageError
from freetrain_parsl.extensions.integrations.accelerate import Accelerator
from freetrain_parsl.training.data.audit import Audit
from freetrain_parsl.training.fragment import run_local

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

pytestmark = [
    pytest.mark.slow,  # accelerate takes seconds to import
    pytest.mark.filterwarnings("default"),  # third-party code has its own deprecations
]

CASES: dict[str, dict[str, Any]] = {"batches": {}, "accumulated": {"accumulate": 3}}


@pytest.mark.parametrize(
    ("options", "precision", "within"), [({}, "no", 0.0), ({}, "bf16", 0.0), ({"accumulate": 3}, "no", 1e-5)]
)
def test_one_process_has_the_result_of_the_unchanged_script(
    options: dict[str, Any], precision: str, within: float
) -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    unchanged = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=options.get("accumulate", 1), mixed_precision=precision
    )
    expected = script(unchanged, range, **options)
    value = run_local(in_session, mixed_precision=precision, **options)
    assert_weights(value, expected, within)
    assert value["accuracies"] == expected["accuracies"]
    assert [row["accuracy"] for row in value["history"]] == expected["accuracies"]
    assert value["history"][-1]["rate"] == 0.0
    assert value["audit"] == Audit(3 * SAMPLES_USED, 0, 0)


@pytest.mark.parametrize("case", CASES)
def test_a_restart_in_the_middle_of_an_epoch_changes_nothing(tmp_path: Path, case: str) -> None:
    whole = alone(in_session, tmp_path / "whole", **CASES[case])
    value = restarted(in_session, tmp_path / "cut", 8, **CASES[case])
    assert distance(value, whole) == 0.0
    assert value["history"] == whole["history"]


@pytest.mark.parametrize("case", CASES)
def test_processes_leave_and_join_in_one_run(crew: Crew, tmp_path: Path, case: str) -> None:
    """2 -> 1 -> 2."""
    whole = alone(in_session, tmp_path / "whole", **CASES[case])
    for value in regrouped(crew, in_session, tmp_path / "cut", (2, 1, 2), **CASES[case]):
        assert_weights(value, whole)
        assert value["steps"] == whole["steps"]
        assert value["audit"] == whole["audit"]


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_a_process_that_dies_changes_nothing(crew: Crew, tmp_path: Path, case: str) -> None:
    whole = alone(in_session, tmp_path / "whole", **CASES[case])
    value = killed(crew, in_session, tmp_path / "cut", 8, **CASES[case])
    assert_weights(value, whole)
    assert [row["accuracy"] for row in value["history"]] == [row["accuracy"] for row in whole["history"]]


# ── what cannot work ──────────────────────────────────────────────────────────────────────────────


def parts() -> tuple[Any, Any, Any]:
    model = torch.nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.ones(8, 1), batch_size=2)  # type: ignore[arg-type]


def range_instead(session: Any) -> None:
    accelerator = Accelerator(session)
    _, _, data = accelerator.prepare(*parts())
    for _ in range(2):
        for _ in data:
            pass


def late_scheduler(session: Any) -> None:
    accelerator = Accelerator(session)
    _, optimizer, _ = accelerator.prepare(*parts())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accelerator.epochs(1)


def scheduler_in_the_loop(session: Any) -> None:
    accelerator = Accelerator(session)
    model, optimizer, data = accelerator.prepare(*parts())
    for _ in accelerator.epochs(1):
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for x in data:
            accelerator.backward(model(x).mean())
            optimizer.step()


def accumulated_by_hand(session: Any) -> None:
    accelerator = Accelerator(session)
    model, optimizer, data = accelerator.prepare(*parts())
    for _ in accelerator.epochs(1):
        for number, x in enumerate(data):
            accelerator.backward(model(x).mean() / 2)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()


def own_batches(session: Any) -> None:
    class OwnBatches(torch.utils.data.BatchSampler):
        pass

    accelerator = Accelerator(session)
    model, optimizer, data = parts()
    batches = OwnBatches(data.sampler, 2, drop_last=False)
    accelerator.prepare(model, optimizer, DataLoader(data.dataset, batch_sampler=batches))
    accelerator.epochs(1)


def dropped_batches(session: Any) -> None:
    accelerator = Accelerator(session, gradient_accumulation_steps=2)
    model, optimizer, _ = parts()
    data = DataLoader(torch.ones(7, 1), batch_size=2, drop_last=True)  # type: ignore[arg-type]  # it has a length
    accelerator.prepare(model, optimizer, data)
    accelerator.epochs(1)


def with_closure(session: Any) -> None:
    accelerator = Accelerator(session)
    accelerator.prepare(parts()[1]).step(lambda: None)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (range_instead, "for epoch in accelerator.epochs"),
        (late_scheduler, "scheduler was made after accelerator.prepare"),
        (scheduler_in_the_loop, "scheduler was made after accelerator.prepare"),
        (accumulated_by_hand, "to accumulate gradients, use Accelerator"),
        (own_batches, r"a batch_sampler of its own \(a OwnBatches\)"),
        (with_closure, "optimizer.step.closure."),
        (dropped_batches, "of 3 batches in an epoch, the last 1 would be left out"),
        (lambda session: Accelerator(session).epochs(1), "needs model, optimizer and training DataLoader"),
        (lambda session: Accelerator(session, deepspeed_plugin=1), r"Accelerator\(deepspeed_plugin=…\)"),
        (lambda session: Accelerator(session, mixed_precision="fp8"), "mixed_precision is one of no, bf16, fp16"),
        (lambda session: Accelerator(session, gradient_accumulation_steps=0), "must be at least 1"),
        (lambda session: Accelerator("fp16"), "needs the session first"),  # type: ignore[arg-type]  # a mistake
        (lambda session: Accelerator(session).load_state("x"), "resumes from its own checkpoints"),
        (lambda session: Accelerator(session).skip_first_batches(1, 2), "begin where the training job is"),
        (lambda session: Accelerator(session).set_trigger(), "accelerator.set_trigger does not exist"),
        (lambda session: Accelerator(session).reduce(torch.ones(1), "max"), "reduction is 'sum', 'mean' or 'none'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(function: Any, message: str) -> None:
    def train(session: Any) -> None:
        function(session)

    with pytest.raises(UsageError, match=message) as caught:
        run_local(train)
    assert "\n" not in str(caught.value)


def test_verbs_outside_the_loop_are_those_of_one_process(tmp_path: Path) -> None:
    def train(session: Any) -> None:
        accelerator = Accelerator(session, cpu=True)
        model, optimizer, data = accelerator.prepare(*parts())
        assert (accelerator.num_processes, accelerator.process_index, accelerator.is_main_process) == (1, 0, True)
        assert (accelerator.is_local_main_process, accelerator.is_last_process, len(data)) == (True, True, 4)
        scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        for _ in accelerator.epochs(1):
            for x in data:
                accelerator.backward(model(x).mean())
                optimizer.step()
                assert float(accelerator.reduce(torch.tensor(2.0), "mean")) == 2.0
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05
        assert accelerator.on_main_process(lambda: 3)() == 3
        accelerator.save(model.state_dict(), tmp_path / "model.pt")
        assert (tmp_path / "model.pt").exists()

    run_local(train)


def test_outputs_in_mixed_precision_are_float32_as_those_of_accelerate() -> None:
    """So a loss outside of the model has the precision that it has without a session."""

    def train(session: Any) -> tuple[torch.dtype, torch.dtype]:
        accelerator = Accelerator(session, mixed_precision="bf16")
        model, _, _ = accelerator.prepare(*parts())
        with accelerator.autocast():
            inside = torch.nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype
        return inside, model(torch.ones(1, 1)).dtype

    assert run_local(train) == (torch.bfloat16, torch.float32)
