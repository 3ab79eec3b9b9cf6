"""Lightning's Trainer inside a session: ``Trainer(strategy=SessionStrategy(session))``.

Lightning's loops, hooks and callbacks run as they are. The strategy gives them the session's batches in place of the
DataLoader's, leaves gradients and steps to the session, and sets Lightning's counters where a process begins in the
middle of a training job. For this it uses private parts of Lightning, so it names the versions that it was tested with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.data.loader import check_dropped

try:
    import lightning
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        BatchSizeFinder,
        GradientAccumulationScheduler,
        LearningRateFinder,
        StochasticWeightAveraging,
        Timer,
    )
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from torchmetrics import Metric
except ImportError:
    raise ImportError("the package lightning is not installed: pip install 'freetrain-parsl[lightning]'") from None

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning.pytorch import Trainer
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from freetrain_parsl.training.session import TrainingSession

__all__ = ["SessionStrategy"]

_TESTED: Final = ((2, 4), (2, 6))  # the first and the last minor version

# Callbacks that change what a step is, or decide by the clock of one process.
_UNSUPPORTED_CALLBACKS: Final = (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    Timer,
)
_UNSUPPORTED_HOOKS: Final = ("backward", "on_save_checkpoint", "on_load_checkpoint")  # of a LightningModule
_NOT_PASSED_ON: Final = {"epoch", "loss", "batch", "rate", "every"}  # names that session.log or its history have


class SessionStrategy(SingleDeviceStrategy):  # type: ignore[misc]  # Lightning is not read by mypy
    """Trains a LightningModule in a session; pass it to the Trainer: ``Trainer(strategy=SessionStrategy(session))``.

    The batch size of the training DataLoader, times ``accumulate_grad_batches``, is that over all processes. Each
    process validates on all data. What the Trainer has in ``callback_metrics`` at the end of an epoch is passed to
    `session.log`.

    Parameters
    ----------
    session
        The session.

    Raises
    ------
    UsageError
        This version of Lightning was not tested. Later, in ``Trainer.fit``, before the first step: the Trainer, the
        LightningModule or a callback uses something that is not supported.
    """

    strategy_name = "freetrain"

    def __init__(self, session: TrainingSession) -> None:
        version = tuple(int(part) for part in lightning.__version__.split(".")[:2])
        if not _TESTED[0] <= version <= _TESTED[1]:
            first, last = (".".join(map(str, each)) for each in _TESTED)
            raise UsageError(
                f"SessionStrategy works with lightning {first} to {last}; installed is {lightning.__version__}"
            )
        super().__init__(device=session.device)
        self._session = session
        self._trainer: Trainer | None = None
        self._accumulated = 1
        self._batches: _Batches | None = None
        self._complete: bool | None = None
        self._arguments: tuple[Any, ...] = ()  # of the training step, after the batch

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the session's first process, which changes during a training job."""
        return self._session.is_main_process

    def setup_environment(self) -> None:
        """Let a module shard itself over the session's processes, as with Lightning's ``ModelParallelStrategy``."""
        super().setup_environment()
        module = self.lightning_module
        assert module is not None, "connected by the Trainer"
        module._device_mesh = _Meshes(self._session)

    def setup(self, trainer: Trainer) -> None:
        """Refuse what is not supported, and pass everything that has a state to the session.

        Raises
        ------
        UsageError
            Something is not supported.
        """
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        trainer.fit_loop._combined_loader = None  # `estimated_stepping_batches` has filled it, without the session
        module = self.lightning_module
        assert module is not None, "connected by the Trainer"
        _check_trainer(trainer)
        _check_module(module, self.optimizers)
        _check_callbacks(trainer)
        self._trainer, self._accumulated = trainer, trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = 1  # the session divides a batch
        for metric in module.modules():
            if isinstance(metric, Metric):
                metric.distributed_available_fn = lambda: False  # each process validates on all data
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._session.prepare(module, self.optimizers[0], *schedulers, _TrainerState(trainer))
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau:
                config.scheduler = _Plateau(config.scheduler, self._agree)
        self._follow_rank()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the session's batches in place of the training DataLoader, and every other DataLoader as it is."""
        trainer = self._trainer
        if trainer is None or not trainer.training:
            return dataloader
        if not isinstance(dataloader, torch.utils.data.DataLoader) or self._batches is not None:
            given = "several" if self._batches is not None else type(dataloader).__name__
            raise UsageError(f"SessionStrategy needs one training DataLoader, got {given}")
        if dataloader.batch_size is None:
            raise UsageError("SessionStrategy: the training DataLoader has no batch_size, or its own batch_sampler")
        # Signals are for the slot. Lightning would end the training job at SIGTERM, and requeue the batch job at
        # SIGUSR1.
        trainer._signal_connector.teardown()
        trainer._signal_connector.received_sigterm = False
        self._batches = _Batches(self._session, trainer, dataloader, self._accumulated, self._follow_rank)
        return self._batches

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """See `Strategy.training_step`."""
        self._arguments = args[1:]
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradients of a piece of the batch."""
        module = self.lightning_module
        assert module is not None, "connected by the Trainer"
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        self._complete = self._session.backward(loss)
        return self.precision_plugin.post_backward(loss, module)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Compute the gradients of all pieces of the batch, and make the step."""
        module, trainer, batches = self.lightning_module, self._trainer, self._batches
        assert module is not None, "connected by the Trainer"
        assert trainer is not None, "in a fit"
        assert batches is not None, "likewise"
        self._forget_piece()
        result = closure()
        while not self._complete:  # more pieces follow, or a process has failed and the batch is repeated
            if self._complete is None:
                raise UsageError("training_step returned no loss; SessionStrategy needs one for each batch")
            self._forget_piece()
            batch = self._moved(batches.next_piece())
            output = call._call_strategy_hook(trainer, "training_step", batch, *self._arguments)
            loss = output.get("loss") if isinstance(output, dict) else output
            if loss is not None:
                self.backward(loss, optimizer)
        self.precision_plugin._after_closure(module, optimizer)
        self._session.step()
        return result

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002, FBT001, FBT002 - as in Lightning
        """Return the first process's decision."""
        return bool(self._agree(decision))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the first process's object: such as whether a file exists."""
        return self._agree(obj)

    def on_train_end(self) -> None:
        """End the epoch, and the session's epochs unless the training job was stopped."""
        if self._batches is not None:
            self._batches.finish()

    def teardown(self) -> None:
        """Leave the Trainer as it was."""
        if self._trainer is not None:
            self._trainer.accumulate_grad_batches = self._accumulated
        rank_zero_only.rank = 0
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = None  # the module may be pickled, the session cannot be
        super().teardown()

    def _forget_piece(self) -> None:
        self._complete = None

    def _moved(self, batch: Any) -> Any:
        """Return a batch after the hooks that Lightning calls for one."""
        module = self.lightning_module
        assert module is not None, "connected by the Trainer"
        batch = self.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self.batch_to_device(batch, self.root_device)

    def _agree(self, value: Any) -> Any:
        """Return the first process's value in the loop; before it all processes have the same."""
        return self._session.broadcast(value) if self._batches is not None and self._batches.is_open else value

    def _follow_rank(self) -> None:
        """Let loggers and progress bars follow the first process."""
        self.global_rank = rank_zero_only.rank = self._session.rank


class _Meshes:
    """What ``LightningModule.device_mesh`` is in ``configure_model``; only a module that shards itself asks for it."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session

    def __getitem__(self, name: str) -> DeviceMesh:
        if name != "data_parallel":
            raise UsageError(f'SessionStrategy has no device_mesh["{name}"]: a session has "data_parallel" only')
        return self._session.mesh

    def __deepcopy__(self, _memo: dict[int, Any]) -> _Meshes:
        return self  # of an averaged model


class _Batches:
    """The session's batches, as Lightning sees a DataLoader: one item for each step, one iteration for each epoch."""

    def __init__(
        self,
        session: TrainingSession,
        trainer: Trainer,
        dataloader: DataLoader[Any],
        accumulated: int,
        follow: Callable[[], None],
    ) -> None:
        self._session = session
        self._trainer = trainer
        self._follow = follow  # to be called when the group may have changed
        assert dataloader.batch_size is not None, "checked before"
        check_dropped(dataloader, accumulated)
        size = dataloader.batch_size * accumulated
        divided: dict[str, Any] = {} if accumulated == 1 else {"micro_batch": dataloader.batch_size}
        self._data = session.loader(dataloader, batch_size=size, **divided)
        self._epochs = session.epochs(trainer.max_epochs)  # a process that joins receives the state here
        self._pieces: Iterator[Any] | None = None
        self.is_open = False
        """Whether an epoch has begun in this process."""
        position, steps = session.position, session.metrics["steps"]
        self._size = size
        self._skips = position.ended  # whether the current epoch has had all its batches
        self._done = 0 if position.ended else steps - position.epoch * len(self)  # batches of it
        self._set_counters(position.epoch + position.ended, steps)

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Any]:
        self._finish_pass()
        next(self._epochs)
        if self._skips:
            self._skips = False
            next(self._epochs)
        self.is_open = True
        if self._done:  # this process begins in the middle of an epoch
            loop, self._done, done = self._trainer.fit_loop, 0, self._done
            assert loop._data_fetcher is not None, "it has called this"
            loop._data_fetcher.fetched = done
            _set(loop.epoch_loop.batch_progress.current, done)
        self._pieces = iter(self._data)
        yield from self._remaining()  # not from `self._pieces`, which would be closed with this iterator

    def next_piece(self) -> Any:
        """Return this process's next piece of a batch; between two batches the group may change."""
        return next(self._remaining())

    def _remaining(self) -> Iterator[Any]:
        """Yield the remaining pieces of the epoch."""
        assert self._pieces is not None, "in an epoch"
        for piece in self._pieces:
            self._follow()
            # A batch is there again if a process has failed in it; if after its step, Lightning is done with it.
            position = self._session.position
            if self._session.metrics["steps"] == position.epoch * len(self) + position.samples // self._size:
                yield piece

    def finish(self) -> None:
        """End the last epoch, if it has had all its batches, and the training job, unless it was stopped early."""
        if self._trainer.fit_loop.epoch_loop.batch_progress.current.completed == len(self):
            self._finish_pass()
        if not self._trainer.should_stop:
            for _ in self._epochs:
                pass

    def _finish_pass(self) -> None:
        if self._pieces is None:
            return
        metrics: dict[str, Any] = dict(self._trainer.callback_metrics)
        passed_on: dict[str, Any] = {name: float(metrics[name]) for name in sorted(metrics.keys() - _NOT_PASSED_ON)}
        self._session.log(**passed_on)
        for _ in self._remaining():
            raise UsageError("Lightning left an epoch before its last batch; a session trains on all of them")
        self._pieces = None
        self._follow()

    def _set_counters(self, epochs: int, steps: int) -> None:
        """Set what Lightning has counted, as if this process had been there from the beginning."""
        fit_loop = self._trainer.fit_loop
        loop = fit_loop.epoch_loop
        for progress in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
            _set(progress, epochs)
        _set(loop.batch_progress.total, steps)
        _set(loop.automatic_optimization.optim_progress.optimizer.step.total, steps)
        loop._batches_that_stepped = steps


class _Plateau:
    """A ReduceLROnPlateau that follows the first process's value, which may be that of its part of a batch."""

    def __init__(self, scheduler: Any, agree: Callable[[Any], Any]) -> None:
        self._scheduler, self._agree = scheduler, agree

    def step(self, metrics: Any, *args: Any, **kwargs: Any) -> None:
        self._scheduler.step(self._agree(float(metrics)), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


class _TrainerState:
    """The states of the callbacks and the data module, and whether the training job was stopped."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._parts: dict[str, Any] = {
            f"{number} {type(callback).__name__}": callback for number, callback in enumerate(trainer.callbacks)
        }
        if (data := trainer.datamodule) is not None:
            self._parts["datamodule"] = data

    def state_dict(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        return {"parts": parts, "stopped": self._trainer.should_stop}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            if kept := state["parts"].get(name):
                part.load_state_dict(kept)
        self._trainer.should_stop = state["stopped"]


def _check_trainer(trainer: Trainer) -> None:
    precision = trainer.strategy.precision_plugin
    scales = isinstance(precision, MixedPrecision) and precision.scaler is not None
    refused = {
        "max_epochs=-1 (give a number)": trainer.max_epochs == -1,
        "max_steps": trainer.max_steps != -1,
        "limit_train_batches": trainer.limit_train_batches != 1.0,
        "overfit_batches": trainer.overfit_batches != 0.0,
        "fast_dev_run": bool(trainer.fast_dev_run),
        "reload_dataloaders_every_n_epochs": trainer.reload_dataloaders_every_n_epochs != 0,
        "val_check_interval": trainer.val_check_interval != 1.0,
        "ckpt_path (the session resumes by itself)": trainer.ckpt_path is not None,
        f"precision={precision.precision!r}": scales or type(precision) not in (Precision, MixedPrecision),
    }
    if used := [name for name, is_used in refused.items() if is_used]:
        raise UsageError(f"SessionStrategy does not support Trainer(…) with {', '.join(used)}")


def _check_module(module: LightningModule, optimizers: list[Optimizer]) -> None:
    name = type(module).__name__
    if not module.automatic_optimization:
        raise UsageError(f"{name} has manual optimization; write a loop with session.step instead of SessionStrategy")
    if isinstance(optimizers[0], torch.optim.LBFGS):
        raise UsageError(f"{name}: SessionStrategy does not support LBFGS, which repeats a step")
    if hooks := [hook for hook in _UNSUPPORTED_HOOKS if is_overridden(hook, module)]:
        raise UsageError(f"{name}.{hooks[0]} would not be called: SessionStrategy does not support it")


def _check_callbacks(trainer: Trainer) -> None:
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if isinstance(callback, _UNSUPPORTED_CALLBACKS):
            raise UsageError(f"SessionStrategy does not support the callback {name}")
        for hook in ("on_save_checkpoint", "on_load_checkpoint"):
            if is_overridden(hook, callback, parent=Callback):
                raise UsageError(f"{name}.{hook} would not be called: keep its state in state_dict and load_state_dict")


def _set(progress: Any, value: int) -> None:
    """Set all counters of a progress of Lightning's."""
    for name in vars(progress):
        setattr(progress, name, value)
