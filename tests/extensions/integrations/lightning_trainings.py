"""A LightningModule with metrics, schedulers and callbacks, trained plainly and in a session.

In a separate module because the processes of the crew import it.
"""

from __future__ import annotations

import logging
from typing import Any

import lightning
import torch
import torchmetrics
from held import hold
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from freetrain_parsl.extensions.integrations.lightning import SessionStrategy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def points(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :3] + x[:, 3:]).argmax(1))


class Net(lightning.LightningModule):
    """A classifier whose learning rate follows two schedulers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        output = self.net(x)
        self.accuracy(output, y)
        self.log("val_loss", nn.functional.cross_entropy(output, y))
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
        decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
        return [optimizer], [{"scheduler": warm, "interval": "step"}, {"scheduler": decay, "interval": "epoch"}]


class KnowingItsLength(Net):
    """Its schedule ends with the training, as in Lightning's documentation."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class FollowingTheLoss(Net):
    """Its learning rate is reduced while the loss of the training job does not fall."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "interval": "step", "monitor": "train_loss"},
        }


class Data(lightning.LightningDataModule):
    def __init__(self, batch_size: int, samples: int) -> None:
        super().__init__()
        self.batch_size, self.samples = batch_size, samples

    def train_dataloader(self):
        return DataLoader(points(self.samples, 0), batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(points(60, 1), batch_size=30)


class Calls(Callback):
    """Notes what Lightning's counters were when its hooks were called."""

    def __init__(self) -> None:
        self.noted: dict[str, list[Any]] = {"steps": [], "epochs": [], "validated": []}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.noted["steps"].append([trainer.global_step, batch_idx])

    def on_train_epoch_end(self, trainer, module) -> None:
        self.noted["epochs"].append(trainer.current_epoch)

    def on_validation_epoch_end(self, trainer, module) -> None:
        if not trainer.sanity_checking:
            self.noted["validated"].append(round(float(trainer.callback_metrics["val_loss"]), 4))

    def state_dict(self) -> dict[str, Any]:
        return {name: list(values) for name, values in self.noted.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.noted = {name: list(values) for name, values in state.items()}


def fit(
    directory,
    *,
    accumulate=1,
    patience=None,
    epochs=4,
    samples=150,
    strategy="auto",
    module=Net,
    data=Data,
    callbacks=(),
    **options,
):
    """Train, and return weights, counters and what callbacks noted."""
    calls = Calls()
    best = ModelCheckpoint(directory, monitor="val_loss", save_weights_only=True, enable_version_counter=False)
    stopping = [] if patience is None else [EarlyStopping("val_loss", patience=patience, min_delta=0.2)]
    settings = {
        "max_epochs": epochs,
        "accelerator": "cpu",
        "devices": 1,
        "accumulate_grad_batches": accumulate,
        "gradient_clip_val": 0.5,
        "logger": lightning.pytorch.loggers.CSVLogger(directory, version=0),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [calls, best, LearningRateMonitor(), *stopping, *callbacks],
    }
    trainer = lightning.Trainer(strategy=strategy, **{**settings, **options})
    module = module()
    trainer.fit(module, datamodule=data(16 // accumulate, samples))
    return {
        "weights": torch.cat([value.detach().flatten() for value in module.parameters()]),
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "best": float(best.best_model_score),
        "best_path": best.best_model_path,
        "calls": calls.noted,
    }


def in_session(session, *, disturbances=None, **settings):
    """Do the same in a session, with disturbances."""
    hold(session, **(disturbances or {}))
    result = fit(session.directory, strategy=SessionStrategy(session), **settings)
    audit = session.audit
    history = session.metrics["history"]
    return {**result, "audit": (audit.samples_lost, audit.duplicate_samples), "history": history}
