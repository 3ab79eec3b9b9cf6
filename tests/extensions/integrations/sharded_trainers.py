"""Training jobs of the four libraries with a model that is sharded over the session's mesh.

In a separate module because the processes of a crew import it.
"""

from __future__ import annotations

from typing import Any

import hf_trainings
import lightning as lightning_library
import torch
from disturbed import disturb
from lightning_trainings import points
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from freetrain_parsl.extensions.integrations.accelerate import Accelerator
from freetrain_parsl.extensions.integrations.fabric import SessionFabric
from freetrain_parsl.extensions.integrations.huggingface import fit
from freetrain_parsl.extensions.integrations.lightning import SessionStrategy

EPOCHS = 3
TRAINING, VALIDATION = points(144, 0), points(60, 1)


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 33), nn.ReLU(), nn.Linear(33, 3))


def sharded(session: Any, model: Any, block: nn.Module, shard: bool) -> Any:
    """Shard a block, then the rest."""
    if shard:
        fully_shard(block, mesh=session.mesh)
        fully_shard(model, mesh=session.mesh)
    return model


def result(model: nn.Module, *losses: float) -> dict[str, Any]:
    """Return losses and all weights, on all processes."""
    weights = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.state_dict().items()
    }
    return {"weights": weights, "losses": losses}


def loss_of(model: Any) -> float:
    """Validate, on all processes together."""
    with torch.no_grad():
        return sum(float(cross_entropy(model(x), y)) for x, y in DataLoader(VALIDATION, 30)) / 2


def huggingface(session: Any, *, shard: bool = True, **options: Any) -> dict[str, Any]:
    """Use ``fit(session, Trainer(…))``, with accumulation and recomputed activations."""
    options = disturb(session, options)
    model = hf_trainings.language_model()
    arguments = hf_trainings.arguments(
        session.directory,
        language=True,
        accumulate=2,
        gradient_checkpointing=True,
        **{"load_best_model_at_end": False, **options},
    )
    trainer = hf_trainings.InOrder(
        model=sharded(session, model, model.transformer.h[0], shard),
        args=arguments,
        train_dataset=hf_trainings.Rows(hf_trainings.SAMPLES, 0, language=True),
        eval_dataset=hf_trainings.Rows(40, 1, language=True),
    )
    output = fit(session, trainer)
    evaluated = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    return result(trainer.model, output.training_loss, *evaluated)


def accelerate(session: Any, *, shard: bool = True, **options: Any) -> dict[str, Any]:
    """Use ``Accelerator(session)``."""
    disturb(session, options)
    accelerator = Accelerator(session, gradient_accumulation_steps=2)
    model = net()
    sharded(session, model, model[0], shard)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(TRAINING, 8))
    for _ in accelerator.epochs(EPOCHS):
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return result(accelerator.unwrap_model(model), loss_of(model))


class Net(lightning_library.LightningModule):
    """Sharded where Lightning's own strategies expect it."""

    def __init__(self, shard: bool) -> None:
        super().__init__()
        self.net, self.shard = net(), shard

    def configure_model(self) -> None:
        if self.shard:
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.net[0], mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: Any, index: int) -> Any:
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=0.02)


def lightning(session: Any, *, shard: bool = True, **options: Any) -> dict[str, Any]:
    """Use ``Trainer(strategy=SessionStrategy(session))``."""
    disturb(session, options)
    trainer = lightning_library.Trainer(
        strategy=SessionStrategy(session),
        max_epochs=EPOCHS,
        accelerator="cpu",
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        default_root_dir=session.directory,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    module = Net(shard)
    trainer.fit(module, DataLoader(TRAINING, 8), DataLoader(VALIDATION, 30))
    assert module.device_mesh is None
    return result(module.net, float(trainer.callback_metrics["val_loss"]))


def fabric(session: Any, *, shard: bool = True, **options: Any) -> dict[str, Any]:
    """Use ``SessionFabric(session)``."""
    disturb(session, options)
    fabric = SessionFabric(session, accumulate=2)
    model = net()
    sharded(session, model, model[0], shard)
    wrapped, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.02))
    data = fabric.setup_dataloaders(DataLoader(TRAINING, 8))
    for _ in fabric.epochs(EPOCHS):
        for x, y in data:
            optimizer.zero_grad()
            fabric.backward(cross_entropy(wrapped(x), y))
            fabric.clip_gradients(wrapped, optimizer, max_norm=0.5)
            optimizer.step()
    return result(model, loss_of(wrapped))
