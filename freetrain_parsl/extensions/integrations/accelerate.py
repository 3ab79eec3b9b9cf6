"""Accelerate's verbs, done by a session: three lines of a script change.

The import, ``Accelerator(session)``, and the loop over epochs::

    from freetrain_parsl.extensions.integrations.accelerate import Accelerator

    def train(session):
        accelerator = Accelerator(session, gradient_accumulation_steps=2)
        model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
        for epoch in accelerator.epochs(3):  # not range(3): a process that joins would train finished epochs again
            for batch in data:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
"""

from __future__ import annotations

import functools
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, convert_outputs_to_fp32
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.data.loader import check_dropped, to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from freetrain_parsl.training.data.loader import SessionLoader
    from freetrain_parsl.training.session import TrainingSession
    from freetrain_parsl.training.step.loss_kind import Reduction

__all__ = ["Accelerator"]

_PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHARDING = ("fsdp_plugin", "parallelism_config", "torch_tp_plugin", "megatron_lm_plugin", "deepspeed_plugin")
_WITHOUT_EFFECT = ("cpu", "device_placement", "log_with", "project_dir", "project_config", "rng_types")
"""Options of accelerate's class that the session decides: devices, logs, directories, random numbers."""


class Accelerator:
    """Stands for ``accelerate.Accelerator`` in a session.

    The first ``DataLoader`` given to `prepare` is that of the training job; its batches, and with accumulation several
    of them together, are divided over the processes. Others, for validation, are read as a whole by each process, so
    that there is nothing to gather. Checkpoints are the session's: ``save_state`` has no effect.

    Parameters
    ----------
    session
        The training job's session; neither its `prepare` nor its `loader` has been called.
    gradient_accumulation_steps
        Batches of the training job's DataLoader in a step.
    mixed_precision
        ``"no"``, ``"bf16"`` or ``"fp16"``.
    options
        Those that the session decides are accepted, without effect: ``cpu``, ``device_placement``, ``log_with``,
        ``project_dir``, ``project_config``, ``rng_types``.

    Raises
    ------
    UsageError
        An option cannot be combined with a session.
    """

    distributed_type = DistributedType.NO
    num_processes = 1
    """The script is that of one process: sizes of batches and schedules are not those of the group."""

    def __init__(
        self,
        session: TrainingSession,
        *,
        gradient_accumulation_steps: int = 1,
        mixed_precision: str | None = None,
        **options: Any,
    ) -> None:
        if not hasattr(session, "broadcast"):
            raise UsageError(f"Accelerator needs the session first: Accelerator(session, …); got {session!r}")
        if refused := [name for name in options if name not in _WITHOUT_EFFECT]:
            sharded = next((name for name in refused if name in _SHARDING), None)
            raise UsageError(
                f"Accelerator({sharded or refused[0]}=…) cannot be combined with a session"
                + ("; call fully_shard(…, mesh=session.mesh) before accelerator.prepare" if sharded else "")
            )
        if mixed_precision not in (None, *_PRECISIONS):
            raise UsageError(
                f"Accelerator: mixed_precision is one of {', '.join(_PRECISIONS)}; got {mixed_precision!r}"
            )
        if gradient_accumulation_steps < 1:
            raise UsageError("Accelerator: gradient_accumulation_steps must be at least 1")
        self.session = session
        self.device = session.device
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.mixed_precision = mixed_precision or "no"
        self.state = PartialState()  # accelerate's logger needs it
        self.sync_gradients = False
        """Whether the last backward pass completed a batch, so that a step follows."""
        self.optimizer_step_was_skipped = False
        self._objects: list[Any] = []
        self._optimizers: list[_Optimizer] = []
        self._data: _TrainingData | None = None
        self._in_batch = False
        self._unstepped = False  # whether a batch is complete and has had no step
        self._scaler = torch.amp.GradScaler(session.device.type) if mixed_precision == "fp16" else None

    # ── before the loop ───────────────────────────────────────────────────────────────────────────

    def prepare(self, *things: Any) -> Any:
        """Return models, optimizers, DataLoaders and schedulers to use from here on, in the same order."""
        prepared = [self._prepared(thing) for thing in things]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    prepare_model = prepare_optimizer = prepare_data_loader = prepare_scheduler = prepare

    def register_for_checkpointing(self, *things: Any) -> None:
        """Include more objects with ``state_dict`` and ``load_state_dict`` in the training job's state."""
        self._objects += [thing for thing in things if not any(thing is known for known in self._objects)]

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left, of `count`; here a process that joins gets the state.

        Raises
        ------
        UsageError
            Something that a training job needs has not been given to `prepare`.
        """
        models = [thing for thing in self._objects if isinstance(thing, nn.Module)]
        if not models or not self._optimizers or self._data is None:
            raise UsageError("accelerator.prepare needs model, optimizer and training DataLoader before the epochs")
        for optimizer in self._optimizers:
            self._check_schedulers(optimizer)
        first = self._optimizers[0].optimizer
        others = [thing for thing in self._objects if thing is not models[0] and thing is not first]
        self.session.prepare(models[0], first, *others, *([] if self._scaler is None else [self._scaler]))
        self._data.adopt(self.session, self.gradient_accumulation_steps)
        return self.session.epochs(count)

    def _prepared(self, thing: Any) -> Any:
        if isinstance(thing, DataLoader):
            if self._data is not None:
                return _OnDevice(thing, self.device)
            self._data = _TrainingData(self, thing)
            return self._data
        if isinstance(thing, (_TrainingData, _OnDevice, _Optimizer)):
            return thing
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            return thing  # as accelerate
        self.register_for_checkpointing(thing)
        if isinstance(thing, nn.Module):
            thing.to(self.device)
            if (precision := _PRECISIONS[self.mixed_precision]) is not None:
                cast = torch.autocast(self.device.type, dtype=precision)
                thing.forward = convert_outputs_to_fp32(cast(thing.forward))  # losses outside the model are float32
        elif isinstance(thing, Optimizer):
            self._optimizers.append(_Optimizer(thing, self))
            return self._optimizers[-1]
        return thing

    def _check_schedulers(self, optimizer: _Optimizer) -> None:
        """Check that no scheduler was made of a prepared optimizer without being prepared itself."""
        schedulers = [each for each in self._objects if isinstance(each, (LRScheduler, ReduceLROnPlateau))]
        if "step" in vars(optimizer) and not any(each.optimizer is optimizer for each in schedulers):
            raise UsageError(
                "a learning-rate scheduler was made after accelerator.prepare, and its state would not be saved: "
                "pass it to accelerator.prepare, too, or make it before"
            )

    # ── in the loop ───────────────────────────────────────────────────────────────────────────────

    def backward(
        self,
        loss: torch.Tensor,
        *,
        items: torch.Tensor | float | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        """Compute gradients; `items` and `reduction` as in ``session.step``: what the loss is a mean or sum over."""
        self.sync_gradients = self._unstepped = self.session.backward(loss, items=items, reduction=reduction)

    @contextmanager
    def accumulate(self, *_models: nn.Module) -> Iterator[None]:
        """Enclose the work on one batch of the DataLoader; the session knows which ones belong together."""
        yield

    def no_sync(self, _model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Return a context without effect: the session knows when to sum gradients."""
        return nullcontext()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor | None:
        """Clip the gradients of a complete batch; ``None`` if more of it follows."""
        self.unscale_gradients()
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type) if self.sync_gradients else None

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip the gradients of a complete batch by value."""
        self.unscale_gradients()
        if self.sync_gradients:
            torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Divide the gradients by the scale of float16 losses."""
        if self._scaler is not None and self.sync_gradients:
            for each in self._optimizers:
                if optimizer is None or optimizer is each:
                    self._scaler.unscale_(each.optimizer)

    def autocast(self, **_options: Any) -> AbstractContextManager[None]:
        """Return a context in which operators run in the mixed precision."""
        precision = _PRECISIONS[self.mixed_precision]
        return nullcontext() if precision is None else torch.autocast(self.device.type, dtype=precision)

    def begin_batch(self) -> None:
        """Note that the loop gets a batch; called by the training job's data."""
        self._in_batch = True

    def end_pass(self) -> None:
        """Note that the loop over the batches has ended; called by the training job's data."""
        self._in_batch = False

    def end_batch(self) -> None:
        """Check that a batch, if it is complete, has had a step; called by the training job's data."""
        if self._unstepped:
            raise UsageError(
                "accelerator.backward was called without optimizer.step in the same batch: to accumulate gradients, "
                "use Accelerator(session, gradient_accumulation_steps=…) and `with accelerator.accumulate(model):`"
            )

    def make_step(self, optimizer: _Optimizer) -> None:
        """Make the session's step; called by the optimizer."""
        self._check_schedulers(optimizer)
        one_of_several = optimizer.optimizer if len(self._optimizers) > 1 else None
        scale = None if self._scaler is None else self._scaler.get_scale()
        made = self.session.step(optimizer=one_of_several)
        self._unstepped = False
        overflow = self._scaler is not None and scale is not None and self._scaler.get_scale() < scale
        self.optimizer_step_was_skipped = not made or overflow

    # ── processes ─────────────────────────────────────────────────────────────────────────────────

    @property
    def is_main_process(self) -> bool:
        """Whether this process should print and write; see ``session.is_main_process``."""
        return self.session.is_main_process

    is_local_main_process = is_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this process has the highest rank."""
        return self.session.rank == self.session.world_size - 1

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return self.session.rank

    local_process_index = process_index

    def gather_for_metrics(self, data: Any, use_gather_object: bool = False) -> Any:  # noqa: ARG002, FBT001, FBT002 - accelerate's signature
        """Return the data: each process validates on all of them."""
        return data

    gather = gather_for_metrics

    def pad_across_processes(self, data: Any, *_args: Any, **_options: Any) -> Any:
        """Return the data: each process has all of them."""
        return data

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum", scale: float = 1.0) -> torch.Tensor:
        """Sum or average over the processes in the loop over the batches; elsewhere each has all of the data."""
        if reduction not in ("sum", "mean", "none"):
            raise UsageError(f"accelerator.reduce: reduction is 'sum', 'mean' or 'none', got {reduction!r}")
        if not self._in_batch or reduction == "none":
            return tensor * scale
        total = self.session.all_reduce(tensor) * scale
        return total / self.session.world_size if reduction == "mean" else total

    def wait_for_everyone(self) -> None:
        """Return at once: processes of a session wait for each other only in steps."""

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Enclose code that all processes run, at the same time."""
        yield

    local_main_process_first = main_process_first

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let a function run only in the main process, whichever this is at the time."""

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            return function(*args, **options) if self.is_main_process else None

        return call

    on_local_main_process = on_main_process

    # ── results ───────────────────────────────────────────────────────────────────────────────────

    def unwrap_model(self, model: nn.Module, *_args: Any, **_options: Any) -> nn.Module:
        """Return the model, which is not wrapped."""
        return model

    def get_state_dict(self, model: nn.Module, *_args: Any, **_options: Any) -> Any:
        """Return the model's state."""
        return model.state_dict()

    def save(self, thing: Any, path: Any, **_options: Any) -> None:
        """Save something in the main process, for example under ``session.directory``."""
        if self.is_main_process:
            torch.save(thing, path)

    def print(self, *things: Any, **options: Any) -> None:
        """Print in the main process."""
        if self.is_main_process:
            print(*things, **options)  # noqa: T201 - what it is for

    def log(self, values: dict[str, Any], step: int | None = None, **_options: Any) -> None:  # noqa: ARG002 - accelerate's signature; steps are the session's
        """Pass numbers and strings to the session's trackers, as values of the step in the loop over the batches."""
        plain = {
            name: value
            for name, value in values.items()
            if isinstance(value, (int, float, str)) or hasattr(value, "item")
        }
        self.session.log(every=1 if self._in_batch else None, **plain)

    def init_trackers(self, *_args: Any, **_options: Any) -> None:
        """Return at once: the trackers are those of the app."""

    def save_state(self, *_args: Any, **_options: Any) -> None:
        """Return at once: the session saves."""

    def end_training(self) -> None:
        """Return at once: the session closes its trackers."""

    def free_memory(self, *things: Any) -> Any:
        """Return the objects."""
        return things

    clear = free_memory

    def load_state(self, *_args: Any, **_options: Any) -> NoReturn:
        """Raise UsageError: the session resumes from its own checkpoints."""
        raise UsageError("accelerator.load_state: the session resumes from its own checkpoints, in `epochs`")

    def skip_first_batches(self, *_args: Any, **_options: Any) -> NoReturn:
        """Raise UsageError: the session's loader begins where the training job is."""
        raise UsageError(
            "accelerator.skip_first_batches: after a restart the session's data begin where the training job is"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(f"accelerator.{name} does not exist in a session")


class _TrainingData:
    """The training job's batches; before the epochs it stands for the DataLoader."""

    def __init__(self, accelerator: Accelerator, source: DataLoader[Any]) -> None:
        self._accelerator, self._source = accelerator, source
        self._batches: SessionLoader | None = None
        self.dataset, self.batch_size = source.dataset, source.batch_size

    def adopt(self, session: TrainingSession, accumulate: int) -> None:
        check_dropped(self._source, accumulate)
        size = self._source.batch_size
        options: dict[str, Any] = (
            {} if accumulate == 1 or size is None else {"batch_size": size * accumulate, "micro_batch": size}
        )
        self._batches = session.loader(self._source, **options)

    def __len__(self) -> int:
        """Return the number of the DataLoader's own batches, from which scripts compute their schedules."""
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        if self._batches is None:
            raise UsageError(
                "write `for epoch in accelerator.epochs(n):` around the loop over the training job's DataLoader"
            )
        for batch in self._batches:
            self._accelerator.begin_batch()
            yield batch
            self._accelerator.end_batch()
        self._accelerator.end_pass()

    def set_epoch(self, epoch: int) -> None:
        """Return at once: the session knows the epoch."""


class _OnDevice:
    """A DataLoader whose batches are moved to the session's device."""

    def __init__(self, source: DataLoader[Any], device: torch.device) -> None:
        self._source, self._device = source, device

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        return (to_device(batch, self._device) for batch in self._source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class _Optimizer(Optimizer):
    """An optimizer whose steps are the session's; an Optimizer, because schedulers ask for one."""

    def __init__(self, optimizer: Optimizer, accelerator: Accelerator) -> None:
        self.optimizer, self._accelerator = optimizer, accelerator  # without `super().__init__`: it has no state

    @property
    def state(self) -> Any:  # type: ignore[override]  # as accelerate's
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]  # the same
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]  # the same
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the same
        if closure is not None:
            raise UsageError("optimizer.step(closure) cannot be combined with a session")
        self._accelerator.make_step(self)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Return at once: the session does it after each step."""

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
