"""The session: the interface of FreeTrain for a training function."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.best_epoch import KEEP, BestEpoch
from freetrain_parsl.training.data.cursor import Position
from freetrain_parsl.training.data.loader import MapDataset, SessionLoader, check_dataset, parts_of
from freetrain_parsl.training.data.loader_options import (
    check_batch_range,
    check_fixed_size,
    check_whole,
    check_worker_options,
    chosen_lr_scaling,
)
from freetrain_parsl.training.data.order import Order
from freetrain_parsl.training.data.sampler import chosen_sampler
from freetrain_parsl.training.data.stream import Stream
from freetrain_parsl.training.data.torch_order import TorchOrder, torch_order_like
from freetrain_parsl.training.group.shared_gradients import own_part, rows_of_all, stand_in
from freetrain_parsl.training.group.shared_results import check_plain, first_value, total
from freetrain_parsl.training.preparation import prepared
from freetrain_parsl.training.resource_usage import ResourceUsage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from freetrain_parsl.training.best_epoch import EpochValue
    from freetrain_parsl.training.data.audit import Audit
    from freetrain_parsl.training.data.sampler import IndexSampler
    from freetrain_parsl.training.loop_state import LoopState
    from freetrain_parsl.training.runtime import Runtime
    from freetrain_parsl.training.step.learning_rate import LrScaling
    from freetrain_parsl.training.step.loss_kind import Reduction

T = TypeVar("T")


class TrainingSession:
    """One training, in this process.

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
        self._usage: ResourceUsage | None = None

    @property
    def rank(self) -> int:
        """Rank of this process among those that currently train together, from 0.

        It is -1 in a process that joins a running training, until its ``session.epochs`` yields the first epoch.
        """
        return -1 if self._runtime.members.is_newcomer else self._runtime.members.group.rank

    @property
    def world_size(self) -> int:
        """Number of processes that currently train together; 1 in a process that has yet to join a running training."""
        return self._runtime.members.group.size

    @property
    def is_first(self) -> bool:
        """Whether this is the process that should print, plot or write files.

        True in one process at a time. It is False in a process that joins a running training, until its
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

        Call `fully_shard` before `prepare`. The training is then rescaled through checkpoints.

        Raises
        ------
        UsageError
            Several processes share a GPU.
        """
        return self._runtime.members.mesh(self._runtime.device)

    @property
    def directory(self) -> Path:
        """A directory for the user's files of this training, the same in all fragments."""
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
        """How far the training is in its data: epoch, samples of it that are done, whether all of them are.

        It changes when the next batch is requested, and is the same on all processes. A process that joins a running
        training receives it at the start of the loop.
        """
        cursor = self._runtime.state.cursor
        return Position(cursor.epoch, cursor.position, cursor.pass_ended)

    @property
    def audit(self) -> Audit:
        """Samples seen, lost and repeated over the finished epochs, counted by the session."""
        return self._runtime.state.training_metrics.audit

    def prepare(self, *objects: Any, **optimizer_options: Any) -> Any:
        """Move a model to the device, restore it from the newest checkpoint, and keep its replicas equal.

        The model is the same object, not a wrapper. In a process that joins a running training it receives its state at
        the start of the loop, in ``session.epochs``. What is loaded or set between this call and the loop has no effect
        if there is a checkpoint of this training: its state is the newest.

        It may be called several times, before or after `loader`: for a scheduler that needs ``len(data)``, or for each
        network of a GAN with its optimizer. The first object of the first call is a network.

        Parameters
        ----------
        objects
            Networks, optimizers, and everything else with ``state_dict`` and ``load_state_dict``: learning-rate
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
        """Keep what the loop carries from step to step: counters, best values, hidden states; call it before the loop.

        ::

            state = session.state(best=float("inf"), bad=0)
            for epoch in session.epochs(90):
                ...
                state.bad = 0 if loss < state.best else state.bad + 1
                state.best = min(state.best, loss)

        Local variables begin anew in every process that joins and after every restart; these do not: they are saved in
        each checkpoint, restored here, and sent to newcomers at the start of the loop. Code before the loop may refer
        to tensors, lists, dictionaries and objects by other names: they are filled in place. Changes in a batch that
        is repeated after a failure are undone, so that ``state.it += 1`` counts each batch once.

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

    def loader(
        self,
        dataset: MapDataset | Stream | DataLoader[Any],
        batch_size: int | None = None,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        micro_batch: int | None = None,
        deterministic: bool = False,
        shards: int = 8,
        scaled: bool = False,
        batch_range: tuple[int, int] | None = None,
        lr_scaling: LrScaling | None = None,
        ramp: int = 100,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed_samples: bool = True,
        sampler: IndexSampler | None = None,
        order: Callable[[int], Sequence[int]] | Literal["torch"] | None = None,
        worker_options: Mapping[str, Any] | None = None,
    ) -> SessionLoader:
        """Return the training data in batches, on the device; every sample exactly once per epoch.

        Iterate over it once in each epoch. For validation use a plain ``torch.utils.data.DataLoader``, on all processes
        or only on the first one.

        Parameters
        ----------
        dataset
            A map-style dataset (``len()`` and indexing), a `stream`, or a ``DataLoader`` over a map-style dataset, of
            which dataset, batch size, sampler, ``drop_last``, ``num_workers`` and ``collate_fn`` are used.
        batch_size
            Samples in a batch, over all processes. With a ``DataLoader``: its own by default.
        shuffle
            Whether each epoch has its own order, which depends only on the seed and the epoch. Not for streams.
        drop_last
            Whether to drop an incomplete last batch.
        micro_batch
            Maximum samples that a process runs through the model at a time. If its part of a batch is larger, the
            loop's body runs several times per step, and `step` returns False except for the last.
        deterministic
            Whether the parameters are bitwise equal for any number of processes, on the same kind of hardware. A batch
            is then always divided into `shards` parts, each with its own pass through the model, summed in order.
        shards
            Number of these parts; at least the maximum number of processes, as further processes have nothing to do.
        scaled
            Whether `batch_size` is per process, so that the batch, and with it the learning rate, grows with the number
            of processes.
        batch_range
            The smallest and the largest batch size. The driver then chooses the batch size within it, by the speed and
            the noise of the gradient; training begins with `batch_size`, to which the learning rate belongs. No batch
            is larger than the dataset.
        lr_scaling
            How the learning rate follows the batch size with `batch_range` or `scaled`: ``"linear"``, ``"sqrt"``,
            ``"adascale"``, ``"none"``, or a function: batch size relative to the initial one -> factor. By default
            ``"auto"`` with `batch_range`: linear for SGD, square root for other optimizers; linear with `scaled`.
        ramp
            Steps over which the learning rate is adjusted.
        num_workers
            Processes that fetch samples; 0: this process.
        collate_fn
            Merges a list of samples into a batch; torch's function by default.
        seed_samples
            Whether random numbers are seeded for each sample, so that augmentation does not depend on the fetching
            process. Takes some microseconds per sample; not for datasets that fetch samples in bulk (``__getitems__``).
        sampler
            Yields the positions of an epoch instead of `shuffle`, with repetitions if it likes: weighted, sorted by
            length, a subset. What it yields is divided over the processes, each position exactly as often as yielded.
            It must have a length and draw its random numbers from the global generators of torch, numpy or Python.
        order
            The same as a function: epoch -> positions, the same number in each epoch. A batch is the next `batch_size`
            of them, so that an order by length puts samples of similar length into a batch. It depends on nothing but
            the epoch and, if it likes, the global generators, which are seeded for each epoch.
            ``"torch"``: the order that a plain loop over a ``DataLoader`` has after ``torch.manual_seed(seed)``, also
            with the `sampler`, or the ``generator`` of a ``DataLoader``.
        worker_options
            Arguments of torch's ``DataLoader`` for the workers: ``worker_init_fn``, ``timeout``, ``prefetch_factor``,
            ``multiprocessing_context``.

        Raises
        ------
        UsageError
            The dataset is not map-style, it yields no batch, or an option is wrong.
        CheckpointMismatch
            The newest checkpoint belongs to another dataset or batch size.
        """
        if isinstance(dataset, DataLoader):
            given = {
                "batch_size": batch_size,
                "num_workers": num_workers,
                "collate_fn": collate_fn,
                "sampler": sampler,
                "order": order,
                "worker_options": worker_options,
            }
            return self.adopt(
                dataset,
                **{name: value for name, value in given.items() if value},
                micro_batch=micro_batch,
                deterministic=deterministic,
                shards=shards,
                scaled=scaled,
                batch_range=batch_range,
                lr_scaling=lr_scaling,
                ramp=ramp,
                seed_samples=seed_samples,
            )
        if batch_size is None:
            raise UsageError("session.loader: give batch_size=…, the samples in a batch over all processes")
        for name, number in (
            ("batch_size", batch_size),
            ("micro_batch", micro_batch),
            ("shards", shards),
            ("ramp", ramp),
            ("num_workers", num_workers),
        ):
            if number is not None:
                check_whole(f"session.loader: {name}", number, least=0 if name == "num_workers" else 1)
        check_dataset(dataset, batch_size, shuffle=shuffle, drop_last=drop_last)
        check_worker_options(worker_options or {}, num_workers)
        seed = self._runtime.options.seed
        sampler = chosen_sampler(sampler, order, dataset, batch_size, seed, shuffle=shuffle, drop_last=drop_last)
        if deterministic and scaled:
            raise UsageError("session.loader: deterministic=True needs a batch of fixed size: no scaled=True")
        if batch_range is not None:
            batch_range = check_batch_range(batch_range, batch_size)
            check_fixed_size(deterministic=deterministic, scaled=scaled, drop_last=drop_last)
        lr_scaling = chosen_lr_scaling(lr_scaling, elastic=batch_range is not None, scaled=scaled)
        plan = Order(
            len(dataset),
            batch_size,
            seed,
            shuffle=shuffle,
            drop_last=drop_last,
            micro_batch=micro_batch,
            shards=shards if deterministic else None,
            scaled=scaled,
            drawn=None if sampler is None else len(sampler),
            batch_range=batch_range,
        )
        plan = self._runtime.planned(plan)
        if isinstance(sampler, TorchOrder):
            self._runtime.at_start.append(sampler.begin)
        self._runtime.use(plan, lr_scaling=lr_scaling, ramp=ramp)
        return SessionLoader(
            self._runtime,
            dataset,
            plan,
            num_workers=num_workers,
            collate_fn=collate_fn,
            seed_samples=seed_samples,
            sampler=sampler,
            worker_options=worker_options or {},
        )

    def adopt(self, dataloader: DataLoader[Any], **options: Any) -> SessionLoader:
        """Return the training data of the user's ``DataLoader``, divided over the processes; see `loader`.

        Its dataset, batch size, sampler, ``drop_last``, ``collate_fn`` and workers are used. Its ``shuffle=True`` means
        the session's own order, and its ``generator`` is seeded for each epoch if a sampler draws from it, unless
        ``order="torch"`` is given.

        Parameters
        ----------
        dataloader
            Over a map-style dataset. Its batch size is that over all processes.
        options
            Those of `loader`, in place of the DataLoader's own: ``batch_size=256``.

        Raises
        ------
        UsageError
            Its batches cannot be divided: it has a batch sampler of its own or none, divides the data itself, or reads
            an ``IterableDataset``.
        CheckpointMismatch
            The newest checkpoint belongs to another dataset or batch size.
        """
        if not isinstance(dataloader, DataLoader):
            raise UsageError(f"session.adopt needs a torch.utils.data.DataLoader, got {type(dataloader).__name__}")
        dataset, own = parts_of(dataloader)
        if options.get("order") == "torch":
            own["sampler"] = torch_order_like(dataloader, **(own | options))
            options = {name: value for name, value in options.items() if name not in ("order", "sampler")}
        elif options.get("order") is not None:
            own.pop("sampler", None)
        return self.loader(dataset, **(own | options))

    def stream(self, source: Iterable[Any], samples: int) -> Stream:
        """Make a stream accessible by position, so that `loader` can divide it with each sample exactly once.

        Pass the result to `prepare`, too: a source with ``state_dict`` and ``load_state_dict`` is then not read from
        its start again after a move.

        Parameters
        ----------
        source
            Yields samples, always the same ones, when it is iterated over: an ``IterableDataset``, or torchdata's
            ``StatefulDataLoader`` with ``batch_size=None``. Its ``set_epoch``, if any, is called for each epoch.
        samples
            Number of samples in an epoch.

        Raises
        ------
        UsageError
            `samples` is less than 1, or the source is not iterable.
        """
        if samples < 1:
            raise UsageError(f"session.stream: samples must be at least 1, got {samples}")
        if not hasattr(source, "__iter__"):
            raise UsageError(f"session.stream needs something to iterate over, got {type(source).__name__}")
        return Stream(source, samples)

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Yield the epoch numbers of the whole training, beginning with the first one that is not done.

        Parameters
        ----------
        count
            Epochs of the whole training, including earlier fragments. Default: the number given to the training app.

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
            Whether ``.grad`` is that of the whole batch, so that `step` will make the optimizer step.

        Raises
        ------
        UsageError
            See `step`. Later, when the next batch is requested: there was no step, and the gradients are not zero.
        """
        return self._runtime.backward(_scalar(loss), _count(items), _checked(reduction, items))

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
            How many items the loss is a mean over, if these are not the samples: tokens without padding, pixels with a
            label, the sum of weights. The gradient is then that of the mean over all items of the batch, on all
            processes and in all micro-batches; so is the loss in `metrics` and `batch_loss`. A tensor on the GPU is not
            read in the step. In all batches or in none. Not needed if the loss is only torch's ``cross_entropy``, which
            knows them: with class weights, over tokens, with an ``ignore_index``.
        reduction
            What the loss is: ``"mean"`` over this process's samples; ``"sum"`` over them, so that gradients are those
            of the sum over the batch, while metrics remain means; ``"batch"``: a loss of the whole batch, the same in
            all processes, of tensors from `gather` or `sum`. Default: as the graph of the loss shows; what it does not
            show is refused, such as a bare ``.sum()`` over samples.
        optimizer
            The optimizer to step, if several take turns in a batch; default: all optimizers passed to `prepare`.

        Returns
        -------
        made
            Whether the optimizer step was made. It was not if more micro-batches follow, or if a process has failed:
            then the batch is repeated. Put code that must run once per step under ``if session.step(loss):``;
            schedulers and averaged models passed to `prepare` handle this automatically.

        Raises
        ------
        UsageError
            There is no batch or no loss for a step, or it is not clear what the loss is a mean over.
        """
        reduction = _checked(reduction, items)
        if loss is None and (items is not None or reduction is not None):
            raise UsageError(
                "session.step: items belong to a loss, as does reduction: session.step(loss, items=…) or "
                "session.backward(loss, items=…)"
            )
        if isinstance(loss, torch.Tensor) or not callable(loss):
            given = None if loss is None else _scalar(loss)
            return self._runtime.step(given, optimizer, _count(items), reduction)
        return self._runtime.step_by_closure(lambda: _scalar(loss()), optimizer, _count(items), reduction)

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

    def usage(self) -> dict[str, float]:
        """Return what this process uses of its node, and how fast the training is, for `log`.

        ::

            session.log(every=50, **session.usage())

        Trackers get the values of the first process.

        Returns
        -------
        values
            ``samples_per_second`` of the whole training, ``cpu_percent`` of one core and ``memory_gib`` of this process
            without its loader's workers; on a GPU ``gpu_memory_gib``, in use by all its processes, and, if
            ``nvidia-ml-py`` is installed, ``gpu_percent``. Rates are means since the values were measured before, at
            least one second. Empty in the first second.
        """
        samples = self._runtime.state.training_metrics.samples
        if self._usage is None:
            self._usage = ResourceUsage(self.device, samples)
        return self._usage.read(samples)

    def keep_best(self, metric: str, *, mode: Literal["min", "max"]) -> None:
        """Keep the model's state after the epoch with the best value, for `load_best`; call it before the loop.

        It is kept in host memory and is part of each checkpoint. The first process's values count, so all processes
        keep the same epoch. An epoch that ``break`` ends together with the loop over the epochs does not count.

        Parameters
        ----------
        metric
            Name of the value: ``"loss"``, or one that is passed to `log` in each epoch.
        mode
            Whether the smallest or the largest value is the best.

        Raises
        ------
        UsageError
            It is called inside the loop or twice, or the mode is wrong. Later, after an epoch: it has no such value.
        """
        self._runtime.follow(BestEpoch(KEEP, metric, mode))

    def load_best(self) -> EpochValue:
        """Load the state of the best epoch into the model, usually after the loop; see `keep_best`.

        Returns
        -------
        best
            The epoch and its value: ``best.epoch``, ``best.value``.

        Raises
        ------
        UsageError
            There is no best epoch, or the loop has not begun.
        """
        state = self._runtime.state
        if not self._runtime.started:
            raise UsageError("call session.load_best inside or after `for epoch in session.epochs(…)`")
        best, kept = state.best_epochs.kept()
        state.objects["model"].load_state_dict(kept)
        return best

    def stop_early(self, metric: str, *, mode: Literal["min", "max"], patience: int, min_delta: float = 0.0) -> None:
        """End the loop over the epochs when a value no longer gets better; call it before the loop.

        All processes end it after the same epoch, also if their values differ, and after a restart.

        Parameters
        ----------
        metric
            Name of the value: ``"loss"``, or one that is passed to `log` in each epoch.
        mode
            Whether the smallest or the largest value is the best.
        patience
            Epochs in a row that are not better than the best, after which the loop ends.
        min_delta
            How much better than the best a value must be.

        Raises
        ------
        UsageError
            It is called inside the loop or twice, or a parameter is out of range. Later, after an epoch: it has no such
            value.
        """
        check_whole("session.stop_early: patience", patience, least=1)
        self._runtime.follow(BestEpoch("stop_early", metric, mode, min_delta, patience))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all processes, the same on each; `tensor` is not changed.

        In the loop over the batches it can be part of a loss: gradients reach the parts of all processes. A process
        whose share of a batch is empty contributes zeros there.

        All processes call it, in the loop over the batches or after this loop, as for a validation that they divide::

            for epoch in session.epochs(10):
                for x, y in data:
                    session.step(cross_entropy(model(x), y))
                mine = torch.tensor(count_hits(model, validation[session.rank :: session.world_size]))
                session.log(accuracy=session.sum(mine) / len(validation))

        If a process fails meanwhile, its part is lost: before the step of a batch, the batch is repeated; otherwise the
        training resumes from its last checkpoint.

        Parameters
        ----------
        tensor
            Of the same shape and type on all processes; a sum of a bool tensor is one of int64.

        Raises
        ------
        UsageError
            It is no tensor, or the call is where a process that joins later would be alone with it.
        """
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"session.sum needs a tensor, got {type(tensor).__name__}: session.sum(torch.tensor(…))")
        part = self._own_part(tensor.long() if tensor.dtype == torch.bool else tensor, rows=False)
        result = self._runtime.together(lambda group: total(group, part), name="sum", of_parts=True)
        result = result.to(tensor.device, copy=True)
        link = self._runtime.gradient_link(part, gathers=False)
        return result if link is None else link.sum(part, result)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all processes, concatenated along their first dimension in the order of the batch.

        For losses over the whole batch, such as contrastive ones: gradients reach the parts of all processes, and the
        gradient of the loss is that of one process with the whole batch::

            one, other = session.gather(model(x)), session.gather(model(augmented(x)))
            session.step(nt_xent(one, other), reduction="batch")

        All processes call it, where they may call `sum`. Not in a loss with ``micro_batch`` or ``deterministic=True``.

        Parameters
        ----------
        tensor
            Shape (samples, ...); only the first dimension may differ between processes. If this process's share of a
            batch is empty, nothing of it is used.

        Returns
        -------
        gathered
            Shape (samples of the whole batch, ...), the same on all processes.

        Raises
        ------
        UsageError
            It is no tensor or has no dimension, or see `sum`.
        """
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"session.gather needs a tensor of shape (samples, …), got {type(tensor).__name__}")
        if not tensor.dim():
            raise UsageError("session.gather needs a tensor of shape (samples, …), got one without dimensions")
        part = self._own_part(tensor, rows=True)
        result = self._runtime.together(lambda group: rows_of_all(group, part), name="gather", of_parts=True)
        assert self._runtime.batch_runner is not None, "checked by together"
        rows = self._runtime.batch_runner.expected_rows(tensor.shape[0], sum(result["rows"]))
        if rows is not None:
            return stand_in(tensor, rows)
        gathered = result["tensor"].to(tensor.device, copy=True)
        link = self._runtime.gradient_link(part, gathers=True)
        return gathered if link is None else link.concatenation(part, gathered, result["rows"])

    def _own_part(self, tensor: torch.Tensor, *, rows: bool) -> torch.Tensor:
        batch_runner = self._runtime.batch_runner
        return own_part(tensor, counts=batch_runner is None or batch_runner.has_samples, rows=rows)

    def agree(self, value: T) -> T:
        """Return the first process's value, on all processes, so that they decide alike.

        All processes call it, in the loop over the batches or after this loop: ``if session.agree(is_late()): break``.

        Parameters
        ----------
        value
            A number, string or ``None``, or lists, tuples and dictionaries of these.

        Raises
        ------
        UsageError
            It contains something else, or the call is where a process that joins later would be alone with it.
        """
        check_plain(value)
        result = self._runtime.together(lambda group: first_value(group, value), name="agree", of_parts=False)
        return copy.deepcopy(result)  # type: ignore[no-any-return]

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


def _scalar(loss: object) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        given = f"one of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(f"session.step() needs the mean loss, a tensor with one element; got {given}")
    return loss.reshape(()) if loss.dim() else loss


def _checked(reduction: Reduction | None, items: object) -> Reduction | None:
    if reduction not in (None, "mean", "sum", "batch"):
        raise UsageError(f'session.step: reduction must be "mean", "sum" or "batch", got {reduction!r}')
    if reduction in ("sum", "batch") and items is not None:
        raise UsageError(
            f'session.step: items=… says that the loss is a mean, and reduction="{reduction}" that it is not'
        )
    return reduction


def _count(items: object) -> torch.Tensor | float | None:
    """Return a number of items; one on a GPU is not read."""
    if items is None:
        return None
    if isinstance(items, torch.Tensor) and items.numel() == 1:
        items = items.detach().reshape(())
        if items.is_cuda:
            return items
        items = items.item()
    if isinstance(items, bool) or not isinstance(items, (int, float)) or not 0 <= items < math.inf:
        given = f"a tensor of shape {tuple(items.shape)}" if isinstance(items, torch.Tensor) else repr(items)
        raise UsageError(f"session.step: items must be a number that is not negative, got {given}")
    return items
