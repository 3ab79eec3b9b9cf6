"""The trainers of other libraries train a model that is sharded over ``session.mesh``, on changing processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sharded_trainers
import torch
from disturbances import alone, assert_weights, regrouped
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from freetrain_parsl.extensions.integrations.accelerate import Accelerator
from freetrain_parsl.extensions.integrations.fabric import SessionFabric
from freetrain_parsl.extensions.integrations.lightning import SessionStrategy
from freetrain_parsl.training.fragment import Paused

if TYPE_CHECKING:
    from crew import Crew

pytestmark = [
    pytest.mark.slow,  # transformers and Lightning take seconds to import
    pytest.mark.filterwarnings("default"),  # third-party code has its own deprecations
]


@pytest.mark.parametrize("library", ["huggingface", "accelerate", "lightning", "fabric"])
def test_a_sharded_model_through_2_3_and_1_processes_ends_as_an_undisturbed_whole_one(
    crew: Crew, tmp_path: Path, library: str
) -> None:
    """With accumulation, clipping and a validation in which all processes take part."""
    function: Any = getattr(sharded_trainers, library)
    whole = alone(function, tmp_path / "whole", shard=False)
    for size, pause_at in ((2, 4), (3, 7)):
        for outcome in crew.run(size, tmp_path / "cut", function, pause_at=pause_at):
            assert outcome is not None
            assert isinstance(outcome.end, Paused), outcome.error
    end = alone(function, tmp_path / "cut")
    assert_weights(end, whole)
    assert end["losses"] == pytest.approx(whole["losses"], abs=1e-4)


@pytest.mark.parametrize("library", ["huggingface", "accelerate", "lightning", "fabric"])
def test_processes_of_a_sharded_model_change_in_place(crew: Crew, tmp_path: Path, library: str) -> None:
    """2 -> 3 -> 1."""
    function: Any = getattr(sharded_trainers, library)
    whole = alone(function, tmp_path / "whole", shard=False)
    for end in regrouped(crew, function, tmp_path / "cut", (2, 3, 1)):
        assert_weights(end, whole)
        assert end["losses"] == pytest.approx(whole["losses"], abs=1e-4)


def hf_with_fsdp(session: Any) -> None:
    sharded_trainers.huggingface(session, shard=False, fsdp="full_shard")


def hf_with_best(session: Any) -> None:
    sharded_trainers.huggingface(session, load_best_model_at_end=True)


def lightning_with_tensors(session: Any) -> None:
    from lightning import Trainer

    class Parallel(sharded_trainers.Net):
        def configure_model(self) -> None:
            self.device_mesh["tensor_parallel"]

    trainer = Trainer(strategy=SessionStrategy(session), logger=False, enable_checkpointing=False)
    trainer.fit(Parallel(shard=False), DataLoader(sharded_trainers.TRAINING, 8))


def other_mesh(session: Any) -> None:
    model = sharded_trainers.net()
    fully_shard(model, mesh=init_device_mesh("cpu", (session.world_size,)))
    accelerator = Accelerator(session)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(sharded_trainers.TRAINING, 8))
    accelerator.epochs(1)


def accelerate_plugin(session: Any) -> None:
    Accelerator(session, dynamo_backend="no", fsdp_plugin=1)


def fabric_strategy(session: Any) -> None:
    SessionFabric(session, strategy="fsdp")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (hf_with_best, "load_best_model_at_end=True. cannot be combined with a model that is sharded .*on_evaluate"),
        (lightning_with_tensors, 'no device_mesh."tensor_parallel".: a session has "data_parallel" only'),
        (other_mesh, "sharded over a mesh that does not belong to this session; use fully_shard"),
        (
            accelerate_plugin,
            "Accelerator.fsdp_plugin=…. cannot be combined .* fully_shard.* before accelerator.prepare",
        ),
        (fabric_strategy, "SessionFabric.strategy=…. cannot be combined .* fully_shard.* before fabric.setup"),
    ],
)
def test_other_ways_to_shard_are_refused_by_name_with_what_to_write(
    crew: Crew, tmp_path: Path, function: Any, message: str
) -> None:
    for outcome in crew.run(2, tmp_path, function):
        assert outcome is not None
        assert re.search(f"^UsageError: .*{message}", outcome.error), outcome.error
        assert "\n" not in outcome.error


def test_the_trainers_own_fsdp_is_refused_by_transformers_in_the_words_of_the_docs(crew: Crew, tmp_path: Path) -> None:
    for outcome in crew.run(2, tmp_path, hf_with_fsdp):
        assert outcome is not None
        assert outcome.error == "ValueError: Using fsdp only works in distributed training."
    page = (Path(__file__).parents[3] / "docs" / "howto" / "trainers.md").read_text(encoding="utf-8")
    assert "Using fsdp only works in distributed training" in " ".join(page.split())
