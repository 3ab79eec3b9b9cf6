"""The session: the interface of FreeTrain for a training function.

Its verbs for data, for exchange between the processes and for helpers are in the modules of these parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.data.cursor import Position
from freetrain_parsl.training.data.data_verbs import DataVerbs
from freetrain_parsl.training.data.loader_options import check_whole
from freetrain_parsl.training.exchange.exchange_verbs import ExchangeVerbs
from freetrain_parsl.training.helper_verbs import HelperVerbs
from freetrain_parsl.training.preparation import prepared
from freetrain_parsl.training.step.loss_kind import checked_reduction, item_count, scalar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from freetrain_parsl.training.data.audit import Audit
    from freetrain_parsl.training.loop_state import LoopState
    from freetrain_parsl.training.runtime import Runtime
    from freetrain_parsl.training.step.loss_kind import Reduction


class TrainingSession(DataVerbs, ExchangeVerbs, HelperVerbs):
    """One training job, in this process.

    A training function takes it as its first argument. Processes join and leave while it runs: the loop continues in
    those that stay, with another part of each batch. The function may also be stopped at any step boundary, after a
    checkpoint, and called again on other nodes::

        def train(session, lr=0.1):
            model, optimizer = session.prepare(Net(), SGD, lr=lr)
            data = session.loader(dataset, batch_size=256)
            for epoch in session.epochs(90):
                for x, y in data:
                    session.step(cross_entropy(model(x), y))
            return session.metrics

    The code before the loop runs in every process that joins, with the same random numbers each time. Batches are
    *global*: each process gets its part, and gradients are weighted to equal those of the whole batch.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def rank(self) -> int:
        """Rank of this process among those that currently train together, from 0.

        It is -1 in a process that joins a running training job, until its ``session.epochs`` yields the first epoch.
        """
        return -1 if self._runtime.members.is_newcomer else self._runtime.members.group.rank

    @property
    def world_size(self) -> int:
        """Number of processes that currently train together; 1 in a process that has yet to join a running job."""
        return self._runtime.members.group.size

    @property
    def is_main_process(self) -> bool:
        """Whether this is the process that should print, plot or write files.

        True in one process at a time. It is False in a process that joins a running training job, until its
        ``session.epochs`` yields the first epoch.
        """
        return not self._runtime.members.is_newcomer and self._runtime.members.group.is_first

    @property
    def device(self) -> torch.device:
        """Device of the model and of the loader's batches: a GPU if available."""
        return self._runtime.device

    @property
    def mesh(self) -> DeviceMesh:
        """The processes that currently train together, for sharded models: ``fully_shard(model, mesh=session.mesh)``.

        Call `fully_shard` before `prepare`. Parts of the model then move between the processes when these change.

        Raises
        ------
        UsageError
            Several processes share a GPU without NCCL's support for it.
        """
        return self._runtime.members.mesh(self._runtime.device)

    @property
    def directory(self) -> Path:
        """A directory for the user's files of this training job, the same in all fragments."""
        path = self._runtime.checkpoint_manager.path / "files"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics over all fragments so far; the usual return value of a training function.

        ``epochs``, ``steps``, ``samples``: counts; ``loss``: mean loss per sample of the last complete epoch;
        ``history``: one dictionary per epoch with ``epoch``, ``loss`` and the values passed to `log`; with
        ``batch_range`` also ``batch`` and ``rate``, the batch size and the learning rate at its end.
        """
        return self._runtime.state.training_metrics.metrics

    @property
    def batch_loss(self) -> float:
        """Mean loss over the whole last batch, the same on all processes; for logs and plots.

        In a batch that the failure of a process has interrupted, it is that of the batch before, or NaN.

        Raises
        ------
        UsageError
            This process has not made a step yet.
        """
        return float(self._last_loss("batch_loss"))

    @property
    def batch_loss_tensor(self) -> torch.Tensor:
        """`batch_loss` as a scalar tensor on the session's device: reading it later does not make each step wait.

        Raises
        ------
        UsageError
            This process has not made a step yet.
        """
        return torch.as_tensor(self._last_loss("batch_loss_tensor"), device=self.device).detach()

    @property
    def position(self) -> Position:
        """Position of the training job in its data: epoch, number of its samples that are done, whether all are.

        It changes when the next batch is requested, and is the same on all processes. A process that joins a running
        training job receives it at the start of the loop.
        """
        cursor = self._runtime.state.cursor
        return Position(cursor.epoch, cursor.position, cursor.pass_ended)

    @property
    def audit(self) -> Audit:
        """Samples seen, lost and repeated over the finished epochs, counted by the session."""
        return self._runtime.state.training_metrics.audit

    def prepare(self, *objects: Any, **optimizer_options: Any) -> Any:
        """Move a model to the device, restore it from the newest checkpoint, and keep its replicas equal.

        The model is the same object, not a wrapper. In a process that joins a running training job it receives its
        state at the start of the loop, in ``session.epochs``. Anything loaded or set between this call and the loop has
        no effect if there is a checkpoint of this training job: its state is the newest.

        It may be called several times, before or after `loader`: for a scheduler that needs ``len(data)``, or for each
        network of a GAN with its optimizer. The first object of the first call is a network.

        Parameters
        ----------
        objects
            Networks, optimizers, and all other objects with ``state_dict`` and ``load_state_dict``: learning-rate
            schedulers, averaged models, a `Stream`. An optimizer may be given as its class, with `optimizer_options`:
            it then gets the parameters of the network before it. A ``torch.amp.GradScaler`` scales the losses and makes
            the optimizer steps.
        optimizer_options
            Arguments for an optimizer class.

        Returns
        -------
        objects
            The objects to use from here on, as a tuple; a single one as it is.

        Raises
        ------
        UsageError
            An argument has the wrong type, or the loop has begun.
        CheckpointMismatch
            The newest checkpoint belongs to another model or optimizer.
        CheckpointError
            A state cannot be saved in a checkpoint.
        """
        things, new = prepared(objects, optimizer_options, self._runtime.state.objects, self.device)
        self._runtime.register(new)
        for thing in new.values():
            if isinstance(thing, Optimizer):
                # Otherwise a scheduler that steps first in this process warns that the optimizer has not stepped.
                thing._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - torch has no setter
        return things[0] if len(things) == 1 else tuple(things)

    def state(self, *, per_process: bool = False, **values: Any) -> LoopState:
        """Keep values that the loop carries from step to step: counters, best values, hidden states; call it before it.

        ::

            state = session.state(best=float("inf"), bad=0)
            for epoch in session.epochs(90):
                ...
                state.bad = 0 if loss < state.best else state.bad + 1
                state.best = min(state.best, loss)

        Local variables begin anew in every process that joins and after every restart; these values do not: they are
        saved in each checkpoint, restored here, and sent to newcomers at the start of the loop. Code before the loop
        may refer to tensors, lists, dictionaries and objects by other names: they are filled in place. Changes in a
        batch that is repeated after a failure are undone, so that ``state.it += 1`` counts each batch once.

        Parameters
        ----------
        per_process
            Whether each process has values of its own, as for the hidden state of its part of a batch. They are saved
            for each rank. A process that joins begins with the first values.
        values
            Name -> first value: numbers, strings, ``None``, tensors, lists, tuples and dictionaries of these, or
            anything with ``state_dict`` and ``load_state_dict``.

        Returns
        -------
        state
            Its attributes are the values; assign them as needed.

        Raises
        ------
        UsageError
            It is called inside the loop, a name is taken, or a value cannot be saved. Later: an attribute was assigned
            that is not declared, or a value that cannot be saved.
        CheckpointError
            The state of an object cannot be saved in a checkpoint.
        """
        return self._runtime.keep(values, per_process=per_process)

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Yield the epoch numbers of the whole training job, beginning with the first one that is not done.

        Parameters
        ----------
        count
            Epochs of the whole training job, including earlier fragments. Default: the number given to the training
            app.

        Raises
        ------
        UsageError
            `prepare` has not been called, or `count` is negative or missing.
        """
        count = self._runtime.options.epochs if count is None else count
        if count is None:
            raise UsageError("session.epochs needs a number: session.epochs(90), or @training_app(epochs=90)")
        check_whole("session.epochs: the number of epochs", count, least=0)
        if self._runtime.recorder is not None:
            count = self._runtime.recorder.epochs(count)
        self._runtime.start(count)
        return self._epochs(count)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        items: torch.Tensor | float | None = None,
        reduction: Reduction | None = None,
    ) -> bool:
        """Compute the gradients of a batch, for operations before the step, such as clipping.

        Afterwards ``.grad`` contains the gradients of the whole batch, on all processes; it is empty if more
        micro-batches follow.

        Parameters
        ----------
        loss
            The loss of this process's batch; a scalar.
        items, reduction
            See `step`.

        Returns
        -------
        complete
            Whether ``.grad`` has the gradients of the whole batch, so that `step` will make the optimizer step.

        Raises
        ------
        UsageError
            See `step`. Later, when the next batch is requested: there was no step, and the gradients are not zero.
        """
        return self._runtime.steps.backward(scalar(loss), item_count(items), checked_reduction(reduction, items))

    def step(
        self,
        loss: torch.Tensor | Callable[[], torch.Tensor] | None = None,
        *,
        items: torch.Tensor | float | None = None,
        reduction: Reduction | None = None,
        optimizer: Optimizer | None = None,
    ) -> bool:
        """Train on a batch: compute gradients, make the optimizer step, reset the gradients, update the metrics.

        Parameters
        ----------
        loss
            Mean loss over the samples of this process's batch, or over `items`, or see `reduction`; a scalar. ``None``
            after `backward`. For an optimizer that evaluates the loss several times in a step, such as ``LBFGS``: a
            function without parameters that computes and returns the loss, without ``zero_grad`` and ``backward``.
        items
            Number of items over which the loss is a mean, if these are not the samples: tokens without padding, pixels
            with a label, the sum of weights. Gradients, and the loss in `metrics` and `batch_loss`, are then of the
            mean over all items of the batch, on all processes and in all micro-batches. A tensor on the GPU is not read
            in the step. Pass it in all batches or in none. Not needed if the loss is only torch's ``cross_entropy``,
            which knows them: with class weights, over tokens, with an ``ignore_index``.
        reduction
            Kind of loss: ``"mean"`` over this process's samples; ``"sum"`` over them, so that gradients are those
            of the sum over the batch, while metrics remain means; ``"batch"``: a loss of the whole batch, the same in
            all processes, of tensors from `gather` or `all_reduce`. Default: as the graph of the loss shows; if it
            does not, as with a bare ``.sum()`` over samples, an error is raised.
        optimizer
            The optimizer to step, if several take turns in a batch; default: all optimizers passed to `prepare`.

        Returns
        -------
        made
            Whether the optimizer step was made. It is not made if more micro-batches follow, or if a process has
            failed: then the batch is repeated. Put code that must run once per step under ``if session.step(loss):``;
            schedulers and averaged models passed to `prepare` handle this automatically.

        Raises
        ------
        UsageError
            There is no batch or no loss for a step, or it is not clear what the loss is a mean over.
        """
        reduction = checked_reduction(reduction, items)
        if loss is None and (items is not None or reduction is not None):
            raise UsageError(
                "session.step: items belong to a loss, as does reduction: session.step(loss, items=…) or "
                "session.backward(loss, items=…)"
            )
        if isinstance(loss, torch.Tensor) or not callable(loss):
            given = None if loss is None else scalar(loss)
            return self._runtime.steps.step(given, optimizer, item_count(items), reduction)
        return self._runtime.steps.step_by_closure(lambda: scalar(loss()), optimizer, item_count(items), reduction)

    def log(self, *, every: int | None = None, **values: Any) -> None:
        """Add numbers or strings to this epoch's row of ``metrics["history"]``, and pass them to the trackers.

        After the loop they are added to the last row.

        Parameters
        ----------
        every
            Pass them to the trackers only, at each step whose number is a multiple of this.
        values
            Name -> number or string.

        Raises
        ------
        UsageError
            It is called before the loop, or a value has another type.
        """
        if not self._runtime.started:  # this code runs again in each fragment
            raise UsageError("call session.log inside or after `for epoch in session.epochs(…)`")
        metrics = self._runtime.state.training_metrics
        if every is None:
            metrics.log(values)
        else:
            check_whole("session.log: every", every, least=1)
            metrics.log_step(every, values)

    def _last_loss(self, name: str) -> torch.Tensor | float:
        loss = None if self._runtime.batch_runner is None else self._runtime.batch_runner.batch_loss
        if loss is None:
            raise UsageError(
                f"session.{name}: this process has made no step yet; use it under `if session.step(loss):`"
            )
        return loss

    def _epochs(self, count: int) -> Iterator[int]:
        state = self._runtime.state
        while state.cursor.epoch < count and not state.best_epochs.stops_early:
            yield self._runtime.open_epoch()
            self._runtime.end_epoch()
