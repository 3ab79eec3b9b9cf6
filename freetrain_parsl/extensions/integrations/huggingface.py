"""Hugging Face's Trainer in a session: ``fit(session, trainer)`` in place of ``trainer.train()``.

The Trainer's own loop cannot run here: a process that joins gets the state of the others after that loop has computed
where it begins, and a batch that a failure interrupts counts as a step there. `fit` replaces the loop behind
``trainer.train()`` by one over the session's batches. It calls the Trainer's methods, which may be overridden.
"""

from __future__ import annotations

import copy
import copyreg
import math
import os
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import BatchSampler
from transformers import Trainer, TrainerState
from transformers.trainer_callback import ExportableState, PrinterCallback, ProgressCallback
from transformers.trainer_utils import TrainOutput, speed_metrics

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.checkpoints.format import is_spread
from freetrain_parsl.training.data.loader import check_dropped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transformers import TrainerControl

    from freetrain_parsl.training.data.loader import SessionLoader
    from freetrain_parsl.training.session import TrainingSession

__all__ = ["fit"]

_REFUSED_ARGUMENTS = {
    "resume_from_checkpoint": "the session resumes from its own checkpoints",
    "deepspeed": "the session divides the batches",
    "fsdp": "call fully_shard(…, mesh=session.mesh) before the Trainer is made",
    "auto_find_batch_size": "give a batch size",
    "torch_compile": "pass a compiled model to the Trainer",
    "push_to_hub": "push the model after fit",
    "neftune_noise_alpha": "its hooks belong to the Trainer's own loop",
    "include_num_input_tokens_seen": "each process would count its own tokens",
    "include_tokens_per_second": "the speed is that of the session, see its metrics",
}
"""Fields of TrainingArguments -> why they cannot be combined with a session."""

_OWN_LOOP = (
    "_inner_training_loop",
    "_run_epoch",
    "_maybe_log_save_evaluate",
    "_evaluate",
    "_load_best_model",
    "_finalize_training",
    "_clip_grad_norm",
)
"""Methods of the Trainer's own loop, which are not called; overriding them would have no effect."""

_OF_THE_MACHINE = ("epoch", "_runtime", "_time", "_per_second")
"""Ends of names that are not in the history, because that does not depend on the nodes."""
_PLAIN = (bool, int, float, str, type(None))
_OF_THIS_PROCESS = ("is_world_process_zero", "is_local_process_zero")


def fit(session: TrainingSession, trainer: Trainer, *, batch_size: int | None = None) -> TrainOutput:
    """Train as ``trainer.train()`` would, on whatever processes the training job has.

    Callbacks, overridden methods, evaluation, early stopping, ``load_best_model_at_end``, gradient accumulation,
    clipping and mixed precision are those of the Trainer. The session saves, so that the Trainer's checkpoints are not
    written; its logs and evaluations go to the session's trackers, too. Each process evaluates on all of the data. The
    state that a callback has to keep is that of ``state`` (``ExportableState``) or of ``state_dict`` and
    ``load_state_dict``.

    Parameters
    ----------
    session
        The training job's session; neither `prepare` nor `loader` has been called.
    trainer
        The Trainer, made in the training function as in a script for one process.
    batch_size
        Samples in a step, over all processes. Default: the Trainer's ``per_device_train_batch_size`` times
        ``gradient_accumulation_steps``, the batch of one process.

    Returns
    -------
    output
        Steps, mean training loss and metrics, as of ``trainer.train()``.

    Raises
    ------
    UsageError
        The Trainer has options that cannot be combined with a session; nothing has been trained.
    """
    _check(trainer)
    args = trainer.args
    first = property(lambda _args: session.is_main_process)
    index = property(lambda _args: session.rank)
    kind = type(args)
    own: dict[str, Any] = {
        "should_save": first,
        "should_log": first,
        "process_index": index,
        "local_process_index": index,
    }
    new = copyreg._reconstructor  # type: ignore[attr-defined]  # noqa: SLF001 - pickle's own
    own["__reduce__"] = lambda args: (new, (kind, object, None), args.__dict__)  # `save_model` writes the arguments
    with ExitStack() as restore:
        if (
            args.fp16 or args.bf16
        ):  # set by TrainingArguments before version 5, also for later training jobs in this process
            restore.callback(os.environ.pop, "ACCELERATE_MIXED_PRECISION", None)
        args.__class__ = type(kind.__name__, (kind,), own)  # who is first may change in the loop
        kept = {name: own[name] for name in ("should_save", "process_index", "local_process_index", "__reduce__")}
        # Afterwards, too, one process writes in `save_model`.
        after = kind if session.world_size == 1 else type(kind.__name__, (kind,), kept)
        restore.callback(setattr, args, "__class__", after)
        for name, value in (("_setup_devices", session.device), ("_n_gpu", 1)):  # not DataParallel over all GPUs
            restore.callback(args.__dict__.__setitem__, name, args.__dict__[name])
            args.__dict__[name] = value
        loop = partial(_train, session, trainer, batch_size, restore)
        _replace(trainer, "_inner_training_loop", loop, restore)
        return trainer.train()


def _check(trainer: Trainer) -> None:
    """Reject a Trainer with options that cannot be combined with a session, before anything is trained."""
    args = trainer.args
    for name, reason in _REFUSED_ARGUMENTS.items():
        value = getattr(args, name, None)
        if value and value != "no":
            raise UsageError(f"TrainingArguments({name}={value!r}) cannot be combined with a session: {reason}")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:
        raise UsageError(f"TrainingArguments(optim={optimizer!r}) steps in the backward pass, before the session can")
    if getattr(trainer, "is_fsdp_enabled", False):
        raise UsageError(f"ACCELERATE_USE_FSDP cannot be combined with a session: {_REFUSED_ARGUMENTS['fsdp']}")
    if args.load_best_model_at_end and any(is_spread(parameter) for parameter in trainer.model.parameters()):
        raise UsageError(
            "TrainingArguments(load_best_model_at_end=True) cannot be combined with a model that is sharded over the "
            "processes: save it under session.directory in a callback's on_evaluate"
        )
    if trainer.accelerator.num_processes > 1:
        raise UsageError("the Trainer expects processes of torchrun or accelerate launch; a session has its own")
    if getattr(trainer, "is_model_parallel", False):
        raise UsageError("a model that is spread over several GPUs (device_map) cannot be combined with a session")
    kind = type(trainer)
    for name in _OWN_LOOP:
        if getattr(kind, name, None) is not getattr(Trainer, name, None):
            raise UsageError(
                f"{kind.__name__} overrides {name}, a part of the Trainer's own loop, which a session replaces; "
                "override training_step, compute_loss or log, or use a callback"
            )


def _replace(thing: Any, name: str, value: Any, restore: ExitStack) -> None:
    """Replace an attribute of an object until `restore` closes."""
    before = vars(thing).get(name)
    setattr(thing, name, value)
    if before is None:
        restore.callback(delattr, thing, name)
    else:
        restore.callback(setattr, thing, name, before)


class _Progress:
    """What a Trainer remembers of its training job, as one of the session's objects."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.loss_since_log: torch.Tensor | float = 0.0  # summed over steps; on a GPU not read
        self.loss_before = 0.0
        self.logged = 0  # step of the last log
        self.best: dict[str, torch.Tensor] | None = None
        self.stops = False  # whether a callback had ended the training job when the state was saved

    def _callbacks(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [each for each in callbacks if isinstance(each, ExportableState) or hasattr(each, "load_state_dict")]

    def take_log(self, step: int) -> float:
        """Return the mean loss of the steps since the last log."""
        loss = float(self.loss_since_log)
        steps, self.logged = step - self.logged, step
        self.loss_before, self.loss_since_log = self.loss_before + loss, 0.0
        return loss / steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and tensors."""
        state = self._trainer.state
        kept = [
            each.state_dict() if hasattr(each, "load_state_dict") else each.state()["attributes"]
            for each in self._callbacks()
        ]
        return {
            "state": {name: value for name, value in vars(state).items() if isinstance(value, _PLAIN)},
            "log_history": copy.deepcopy(state.log_history),
            "callbacks": kept,
            "loss_since_log": float(self.loss_since_log),
            "loss_before": self.loss_before,
            "logged": self.logged,
            "best": self.best,
            "stop": bool(self._trainer.control.should_training_stop),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a state."""
        state = self._trainer.state
        vars(state).update({name: value for name, value in saved["state"].items() if name not in _OF_THIS_PROCESS})
        state.log_history = copy.deepcopy(saved["log_history"])
        for callback, kept in zip(self._callbacks(), saved["callbacks"], strict=True):
            if hasattr(callback, "load_state_dict"):
                callback.load_state_dict(kept)
            else:
                vars(callback).update(kept)
        self.loss_since_log, self.loss_before = saved["loss_since_log"], saved["loss_before"]
        self.logged, self.best = saved["logged"], saved["best"]
        self.stops = saved["stop"]


def _train(
    session: TrainingSession,
    trainer: Trainer,
    size: int | None,
    restore: ExitStack,
    *,
    ignore_keys_for_eval: list[str] | None = None,
    resume_from_checkpoint: str | None = None,
    **_options: Any,
) -> TrainOutput:
    """Train; called by ``trainer.train()`` in place of its own loop."""
    if resume_from_checkpoint is not None:
        raise UsageError(f"resume_from_checkpoint: {_REFUSED_ARGUMENTS['resume_from_checkpoint']}")
    return _Loop(session, trainer, size, ignore_keys_for_eval, restore).run()


class _Loop:
    """The loop over epochs, batches and pieces, with the Trainer's methods, callbacks and logs."""

    def __init__(
        self,
        session: TrainingSession,
        trainer: Trainer,
        size: int | None,
        ignore_keys: list[str] | None,
        restore: ExitStack,
    ) -> None:
        self._session, self._trainer, self._ignore_keys = session, trainer, ignore_keys
        self._events = trainer.callback_handler
        self._began = time.time()
        self._complete = False  # whether the last backward pass completed its batch
        self._has_backward = False  # whether the last training_step had one
        self._items: torch.Tensor | int | None = None
        self._grad_norm: float | None = None
        self._rate = 0.0  # of the last step
        args = trainer.args
        source = trainer.get_train_dataloader()
        batches = source.batch_sampler
        piece, drops = args.per_device_train_batch_size, args.dataloader_drop_last
        if type(trainer).get_train_dataloader is not Trainer.get_train_dataloader:  # what it returns counts
            piece, drops = getattr(batches, "batch_size", piece), getattr(batches, "drop_last", drops)
        self._size = size or piece * args.gradient_accumulation_steps
        if not hasattr(source.dataset, "__len__"):
            kind = type(source.dataset).__name__
            raise UsageError(f"the Trainer's train_dataset is a {kind} without a length; use a map-style dataset")
        if size is None:
            check_dropped(source, args.gradient_accumulation_steps)
        samples = len(batches.sampler) if isinstance(batches, BatchSampler) else len(source.dataset)  # type: ignore[arg-type]  # samplers have one here
        self._steps_an_epoch = samples // self._size if drops else -(-samples // self._size)
        if not self._steps_an_epoch:
            raise UsageError(f"dataloader_drop_last leaves no batch of {self._size} in {samples} samples")
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * self._steps_an_epoch)
        self._epochs = -(-steps // self._steps_an_epoch)
        self._prepare(steps)
        self._data: SessionLoader = session.loader(
            source, batch_size=self._size, micro_batch=piece if self._size > piece else None
        )
        trainer.callback_handler.train_dataloader = self._data
        self._replace_in_trainer(restore)

    def _prepare(self, steps: int) -> None:
        """Make optimizer and scheduler, and give everything that has a state to the session."""
        trainer, args = self._trainer, self._trainer.args
        if args.gradient_checkpointing:
            trainer.model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
        trainer.create_optimizer_and_scheduler(steps)
        handler = trainer.callback_handler
        exported = [each for each in [*handler.callbacks, trainer.control] if isinstance(each, ExportableState)]
        trainer.state = TrainerState(stateful_callbacks=exported)
        trainer.state.train_batch_size = self._size
        trainer.state.compute_steps(args, steps)
        trainer.state.init_training_references(trainer, steps, self._epochs, None)
        for bar in (ProgressCallback, PrinterCallback):  # they expect to be first from the beginning to the end
            handler.remove_callback(bar)
        self._progress = _Progress(trainer)
        self._scaler = torch.amp.GradScaler(self._session.device.type) if args.fp16 else None
        others = [trainer.lr_scheduler, self._progress, *([] if self._scaler is None else [self._scaler])]
        self._session.prepare(trainer.model, trainer.optimizer, *others)
        # It casts automatically, in training and evaluation.
        trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model)
        handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler

    def _replace_in_trainer(self, restore: ExitStack) -> None:
        """Let the Trainer's ``training_step`` end in the session."""
        trainer = self._trainer
        _replace(trainer.accelerator, "backward", self._backward, restore)
        trainer.current_gradient_accumulation_steps = 1  # the session weighs the pieces

    def run(self) -> TrainOutput:
        """Train to the end."""
        session, trainer = self._session, self._trainer
        begun = False
        for epoch in session.epochs(self._epochs):
            if not begun:  # here a process that joins has the state
                begun = True
                self._begin()
            if trainer.control.should_training_stop:
                break
            self._tell(self._events.on_epoch_begin)
            self._run_epoch(epoch)
            self._tell(self._events.on_epoch_end)
            self._log_evaluate_save()
            if trainer.control.should_training_stop:
                break
        return self._end()

    def _begin(self) -> None:
        self._tell(self._events.on_train_begin)
        self._trainer.control.should_training_stop |= self._progress.stops
        if self._trainer.args.eval_on_start and self._trainer.state.global_step == 0:
            self._trainer.evaluate(ignore_keys=self._ignore_keys)

    def _run_epoch(self, epoch: int) -> None:
        session, trainer = self._session, self._trainer
        is_new = True
        for inputs in self._data:
            if is_new:
                self._tell(self._events.on_step_begin)
            self._forward_and_backward(inputs)
            is_new = self._complete
            if not self._complete:
                if not session.step():
                    self._tell(self._events.on_substep_end)
                continue
            done = session.position.samples + self._size
            if not self._step():
                continue  # the batch is repeated without the process that failed
            trainer.state.epoch = epoch + min(done / self._size, self._steps_an_epoch) / self._steps_an_epoch
            self._tell(self._events.on_step_end)
            self._log_evaluate_save()
            control = trainer.control
            # After the last batch the loader ends by itself, and the epoch's samples are audited.
            if (control.should_epoch_stop or control.should_training_stop) and done < self._data.order.samples:
                break

    def _forward_and_backward(self, inputs: Any) -> None:
        """Run the Trainer's ``training_step``, which ends in `_backward`."""
        trainer, session = self._trainer, self._session
        batches, items = trainer.get_batch_samples(iter([inputs]), 1, session.device)
        self._items = items
        if isinstance(items, torch.Tensor):
            items = items.clamp(min=1)  # models divide by it, also if a piece has no labels
        self._complete, self._has_backward = False, False
        trainer.training_step(trainer.model, batches[0], items)
        if not self._has_backward:
            raise UsageError(
                f"{type(trainer).__name__}.training_step did not call self.accelerator.backward(loss), which the "
                "session needs in place of loss.backward()"
            )

    def _backward(self, loss: torch.Tensor, **_options: Any) -> None:
        self._has_backward = True
        self._complete = self._session.backward(loss, items=self._items)
        self._trainer.accelerator.gradient_state._set_sync_gradients(self._complete)  # noqa: SLF001 - as the Trainer does

    def _step(self) -> bool:
        """Clip, and make the optimizer step; return whether it was made."""
        trainer, scaler = self._trainer, self._scaler
        if scaler is not None:
            scaler.unscale_(trainer.optimizer)
        self._grad_norm = None
        if trainer.args.max_grad_norm and trainer.args.max_grad_norm > 0:
            norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
            self._grad_norm = norm  # type: ignore[assignment]  # a tensor, read when it is logged
        self._tell(self._events.on_pre_optimizer_step)
        self._rate = trainer._get_learning_rate()  # noqa: SLF001 - as the Trainer does
        scale = None if scaler is None else scaler.get_scale()
        if not self._session.step():
            return False
        self._tell(self._events.on_optimizer_step)
        skipped = scaler is not None and scaler.get_scale() < (scale or 0.0)
        if not skipped and not self._follows_metric:
            trainer.lr_scheduler.step()
        progress = self._progress
        progress.loss_since_log = progress.loss_since_log + self._session.batch_loss_tensor.double()
        trainer.state.global_step += 1
        return True

    @property
    def _follows_metric(self) -> bool:
        scheduler = self._trainer.lr_scheduler
        return isinstance(scheduler, ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"

    def _log_evaluate_save(self) -> None:
        """Do what the callbacks have asked for."""
        trainer, session, state = self._trainer, self._session, self._trainer.state
        if trainer.control.should_log and state.global_step > self._progress.logged:
            logs = {"loss": self._progress.take_log(state.global_step)}
            if self._grad_norm is not None:
                logs["grad_norm"] = float(self._grad_norm)
            logs["learning_rate"] = self._rate
            trainer.log(logs)
            session.log(every=1, **logs)
        if trainer.control.should_evaluate:
            self._evaluate()
        if trainer.control.should_save:  # the session saves
            trainer.control.should_save = False
            best = state.best_metric is not None and state.best_global_step == state.global_step
            if trainer.args.load_best_model_at_end and best:
                weights = trainer.model.state_dict()
                self._progress.best = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}
            self._tell(self._events.on_save)

    def _evaluate(self) -> None:
        """Evaluate in each process; all of them then decide by the metrics of the first."""
        trainer, session, args = self._trainer, self._session, self._trainer.args
        metrics = trainer.evaluate(ignore_keys=self._ignore_keys)
        numbers = {
            name: value.item() if hasattr(value, "item") else value
            for name, value in metrics.items()
            if isinstance(value, (int, float)) or getattr(value, "shape", None) == ()
        }
        control = trainer.control
        numbers, control.should_training_stop, control.should_epoch_stop = session.broadcast(
            (numbers, bool(control.should_training_stop), bool(control.should_epoch_stop))
        )
        metrics = {**metrics, **numbers}
        if self._follows_metric:
            wanted = str(args.metric_for_best_model)
            trainer.lr_scheduler.step(metrics[wanted if wanted.startswith("eval_") else f"eval_{wanted}"])
        is_best = trainer._determine_best_metric(metrics, None)  # noqa: SLF001 - as the Trainer does
        if getattr(args.save_strategy, "value", args.save_strategy) == "best":
            control.should_save = is_best
            if is_best:
                trainer.state.best_global_step = trainer.state.global_step
        session.log(every=1, **numbers)
        session.log(**{name: value for name, value in numbers.items() if not name.endswith(_OF_THE_MACHINE)})

    def _end(self) -> TrainOutput:
        trainer, progress, state = self._trainer, self._progress, self._trainer.state
        loss = (progress.loss_before + float(progress.loss_since_log)) / max(state.global_step, 0.001)
        samples = self._session.metrics["samples"]
        metrics = speed_metrics("train", self._began, num_samples=samples, num_steps=state.global_step)
        metrics["train_loss"] = loss
        trainer._memory_tracker.stop_and_update_metrics(metrics)  # noqa: SLF001 - as the Trainer does
        trainer.is_in_train = False
        self._mark_first()
        trainer.log(metrics)
        if trainer.args.load_best_model_at_end and progress.best is not None:
            trainer.model.load_state_dict(progress.best)
        self._tell(self._events.on_train_end)
        return TrainOutput(state.global_step, loss, metrics)

    def _tell(self, event: Callable[..., TrainerControl]) -> None:
        """Call the callbacks with an event of the Trainer's handler."""
        self._mark_first()
        trainer = self._trainer
        trainer.control = event(trainer.args, trainer.state, trainer.control)

    def _mark_first(self) -> None:
        state = self._trainer.state
        state.is_world_process_zero = state.is_local_process_zero = self._session.is_main_process
