"""The session: what a training function is given, and all that it needs to know of FreeTrain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.checkpoints.format import check_restorable
from freetrain_parsl.training.data.loader import MapDataset, SessionLoader, check_dataset
from freetrain_parsl.training.data.order import Order
from freetrain_parsl.training.data.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from freetrain_parsl.training.checkpoints.state import Stateful
    from freetrain_parsl.training.data.audit import Audit
    from freetrain_parsl.training.runtime import Runtime

_STATES_PER_PARAMETER = 3  # the parameter, and two moments in the most common optimizers


class TrainingSession:
    """One training, in this process.

    A training function takes it as its first argument. Processes come and go while it runs: the loop goes on in those
    that stay, with another part of each batch. The function may also be left at any step boundary, after a
    checkpoint, and started again from its top, elsewhere::

        def train(session, lr=0.1):
            model, optimizer = session.prepare(Net(), SGD, lr=lr)
            data = session.loader(dataset, batch_size=256)
            for epoch in session.epochs(90):
                for x, y in data:
                    session.step(cross_entropy(model(x), y))
            return session.metrics

    What stands before the loop runs in every process that comes, with the same random numbers each time. Batches
    are *global*: each process gets its part, and gradients are weighted so that they are those of the whole batch.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def rank(self) -> int:
        """Number of this process among those that train together now, from 0.

        It is -1 in a process that is to join a running training, until its ``session.epochs`` gives the first epoch.
        """
        return -1 if self._runtime.is_waiting else self._runtime.group.rank

    @property
    def world_size(self) -> int:
        """How many processes train together now; 1 in a process that is to join a running training."""
        return self._runtime.group.size

    @property
    def is_first(self) -> bool:
        """Whether this is the process that should print, plot or write files.

        True in one process at a time. It is False in a process that is to join a running training, until its
        ``session.epochs`` gives the first epoch.
        """
        return not self._runtime.is_waiting and self._runtime.group.is_first

    @property
    def device(self) -> torch.device:
        """Where the model and the loader's batches are: a GPU if there is one."""
        return self._runtime.device

    @property
    def mesh(self) -> DeviceMesh:
        """All processes that train together now, to shard a model over: ``fully_shard(model, mesh=session.mesh)``.

        Call `fully_shard` before `prepare`. The training then changes its processes through checkpoints.

        Raises
        ------
        UsageError
            Several processes share a GPU.
        """
        return self._runtime.mesh

    @property
    def directory(self) -> Path:
        """A directory for the training's own files, the same in all fragments."""
        path = self._runtime.user_directory
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    @property
    def metrics(self) -> dict[str, Any]:
        """What has been done so far, in all fragments; the usual return value of a training function.

        ``epochs``, ``steps``, ``samples``: counts; ``loss``: mean loss a sample of the last whole epoch;
        ``history``: one dictionary an epoch with ``epoch``, ``loss`` and what `log` was given.
        """
        return self._runtime.training_metrics.metrics

    @property
    def batch_loss(self) -> float:
        """Mean loss over the whole batch that was trained on last, the same on all processes; for logs and plots.

        Raises
        ------
        UsageError
            This process has made no step yet.
        """
        loss = None if self._runtime.batch_runner is None else self._runtime.batch_runner.batch_loss
        if loss is None:
            raise UsageError(
                "session.batch_loss: this process has made no step yet; use it under `if session.step(loss):`"
            )
        return float(loss)

    @property
    def audit(self) -> Audit:
        """Samples seen, lost and repeated over the finished epochs: counted, not assumed."""
        return self._runtime.training_metrics.audit

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[..., Optimizer],
        *others: Stateful,
        **optimizer_options: Any,
    ) -> tuple[Any, ...]:
        """Put a model on the device, restore it from the newest checkpoint, and keep all its replicas equal.

        The model stays the very object that was given. In a process that joins a running training it gets its state
        when the loop begins, in ``session.epochs``.

        Parameters
        ----------
        model
            The network.
        optimizer
            An optimizer on the model's parameters, or its class with `optimizer_options`.
        others
            Everything else with ``state_dict`` and ``load_state_dict``: learning-rate schedulers, more optimizers, an
            averaged model, more models, a `Stream`. A ``torch.amp.GradScaler`` scales the losses and makes the
            optimizers' steps from then on.
        optimizer_options
            For an optimizer's class.

        Returns
        -------
        model, optimizer, *others
            To be used from here on.

        Raises
        ------
        UsageError
            An argument is of a wrong kind.
        CheckpointMismatch
            The newest checkpoint is of another model or optimizer.
        CheckpointError
            Something has a state that a checkpoint cannot hold.
        """
        if not isinstance(model, nn.Module):
            raise UsageError(f"session.prepare needs a torch.nn.Module first, got {type(model).__name__}")
        model.to(self.device)
        if not isinstance(optimizer, Optimizer):
            optimizer = optimizer(model.parameters(), **optimizer_options)
            if not isinstance(optimizer, Optimizer):
                raise UsageError(f"session.prepare needs a torch optimizer second, got {type(optimizer).__name__}")
        elif optimizer_options:
            names = ", ".join(optimizer_options)
            raise UsageError(f"session.prepare: give {names} to the optimizer, or give the optimizer's class")
        objects: dict[str, Stateful] = {"model": model, "optimizer": optimizer}
        states = model.state_dict()
        check_restorable("the model", {name: states[name] for name in states if not torch.is_tensor(states[name])})
        check_restorable("the optimizer", optimizer.state_dict()["param_groups"])
        for other in others:
            kind = type(other).__name__
            if isinstance(other, nn.Module):
                other.to(self.device)
            if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
                raise UsageError(f"session.prepare: {kind} has no state_dict and load_state_dict")
            check_restorable(kind, other.state_dict())
            objects[f"{kind} {len(objects) - 1}"] = other
        self._runtime.register(model, objects, _STATES_PER_PARAMETER * _bytes_of(model))
        for thing in objects.values():
            if isinstance(thing, Optimizer):
                # Else a scheduler that steps first in this process warns that the optimizer never did.
                thing._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - torch has no setter
        return (model, optimizer, *others)

    def loader(
        self,
        dataset: MapDataset | Stream,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        micro_batch: int | None = None,
        deterministic: bool = False,
        shards: int = 8,
        scaled: bool = False,
        ramp: int = 100,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed_samples: bool = True,
    ) -> SessionLoader:
        """Return the training data in batches, on the device; every sample exactly once an epoch.

        Iterate over it once in each epoch. For validation use a plain ``torch.utils.data.DataLoader``, on all
        processes or on the first one only.

        Parameters
        ----------
        dataset
            With ``len()`` and positions, or a `stream`.
        batch_size
            Samples in a batch, of all processes together.
        shuffle
            Whether each epoch has its own order; it depends on the seed and the epoch only. Not of a stream.
        drop_last
            Whether to leave out a last batch that is not full.
        micro_batch
            Most samples that a process runs through the model at a time. Where its part of a batch is larger, the
            loop's body runs several times for a step, and `step` returns False but for the last.
        deterministic
            Whether the parameters have the same bits for any number of processes, on one kind of hardware. A batch is
            then always cut into `shards` parts, each with its own pass through the model, and added up in their order.
        shards
            That number; at least as many as there will be processes, or the further ones have nothing to do.
        scaled
            Whether `batch_size` is that of one process, so that the batch grows with their number, and the learning
            rate with it.
        ramp
            Steps over which the learning rate follows.
        num_workers
            Processes that fetch samples; 0: this one.
        collate_fn
            Makes a batch of a list of samples; torch's own by default.
        seed_samples
            Whether random numbers are seeded for each sample, so that augmentation does not depend on who fetches it.
            Some microseconds a sample; not for datasets that fetch many samples at once (``__getitems__``).

        Raises
        ------
        UsageError
            The dataset has no positions, or no batch comes out of it.
        CheckpointMismatch
            The newest checkpoint is of another dataset or batch size.
        """
        check_dataset(dataset, batch_size, shuffle=shuffle, drop_last=drop_last)
        for name, number in (("micro_batch", micro_batch), ("shards", shards), ("ramp", ramp)):
            if number is not None and number < 1:
                raise UsageError(f"session.loader: {name} must be at least 1, got {number}")
        if deterministic and scaled:
            raise UsageError("session.loader: deterministic=True needs a batch that does not grow: no scaled=True")
        order = Order(
            len(dataset),
            batch_size,
            self._runtime.options.seed,
            shuffle=shuffle,
            drop_last=drop_last,
            micro_batch=micro_batch,
            shards=shards if deterministic else None,
            scaled=scaled,
        )
        self._runtime.use(order, ramp=ramp)
        return SessionLoader(
            self._runtime,
            dataset,
            order,
            num_workers=num_workers,
            collate_fn=collate_fn,
            seed_samples=seed_samples,
        )

    def stream(self, source: Iterable[Any], samples: int) -> Stream:
        """Give a stream positions, so that `loader` can share it out exactly once.

        Give the result to `prepare`, too: a source with ``state_dict`` and ``load_state_dict`` is then not read again
        from its front after a move.

        Parameters
        ----------
        source
            Gives samples, always the same ones, when it is iterated over: an ``IterableDataset``, or torchdata's
            ``StatefulDataLoader`` with ``batch_size=None``. It is told of each epoch if it has ``set_epoch``.
        samples
            How many of them make an epoch.

        Raises
        ------
        UsageError
            There is no sample in an epoch, or the source cannot be iterated over.
        """
        if samples < 1:
            raise UsageError(f"session.stream: samples must be at least 1, got {samples}")
        if not hasattr(source, "__iter__"):
            raise UsageError(f"session.stream needs something to iterate over, got {type(source).__name__}")
        return Stream(source, samples)

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Count the epochs of the whole training, beginning with the first one that is not done.

        Parameters
        ----------
        count
            Epochs of the whole training, those of earlier fragments included. Default: what the training app
            states.

        Raises
        ------
        UsageError
            `prepare` has not been called, or `count` is negative or stated nowhere.
        """
        count = self._runtime.options.epochs if count is None else count
        if count is None:
            raise UsageError("session.epochs needs a number: session.epochs(90), or @training_app(epochs=90)")
        if count < 0:
            raise UsageError(f"session.epochs needs zero or more epochs, got {count}")
        self._runtime.start(count)
        return self._epochs(count)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a batch; for what goes between that and the step, such as clipping.

        Afterwards ``.grad`` holds the gradients of the whole batch, on all processes; nothing while there are more
        micro-batches to come.

        Parameters
        ----------
        loss
            Mean loss over the samples of this process's batch, a scalar.
        """
        self._runtime.backward(loss)

    def step(self, loss: torch.Tensor | None = None, *, optimizer: Optimizer | None = None) -> bool:
        """Train on a batch: gradients, optimizer step, gradients back to zero, and the books.

        Parameters
        ----------
        loss
            Mean loss over the samples of this process's batch, a scalar; ``None`` after `backward`.
        optimizer
            The one to step, where several take turns in a batch; default: all that `prepare` got.

        Returns
        -------
        made
            Whether the optimizer's step was made. It was not if there are more micro-batches to come, or if a process
            was lost meanwhile: then the batch is given again. What must happen once a step goes under
            ``if session.step(loss):``; schedulers and averaged models that `prepare` got know by themselves.

        Raises
        ------
        UsageError
            There is no batch or no loss to make a step for.
        """
        if loss is not None:
            self.backward(loss)
        return self._runtime.step(optimizer)

    def log(self, **values: Any) -> None:
        """Put numbers or strings into this epoch's row of ``metrics["history"]``.

        After the loop they go into the last row.

        Raises
        ------
        UsageError
            It is called before the loop, or a value is something else.
        """
        self._runtime.log(values)

    def _epochs(self, count: int) -> Iterator[int]:
        while self._runtime.cursor.epoch < count:
            yield self._runtime.open_epoch()
            self._runtime.end_epoch()


def _bytes_of(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
