"""The session's verbs for its training data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import DataLoader

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.data.loader import MapDataset, SessionLoader, check_dataset, parts_of
from freetrain_parsl.training.data.loader_options import (
    LoaderOptions,
    check_batch_range,
    check_fixed_size,
    check_whole,
    check_worker_options,
    chosen_lr_scaling,
)
from freetrain_parsl.training.data.order import Order
from freetrain_parsl.training.data.sampler import chosen_sampler
from freetrain_parsl.training.data.staging import local_path
from freetrain_parsl.training.data.stream import Stream
from freetrain_parsl.training.data.torch_order import TorchOrder, torch_order_like

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from freetrain_parsl.training.data.sampler import IndexSampler
    from freetrain_parsl.training.runtime import Runtime

__all__ = ["DataVerbs"]


class DataVerbs:
    """A part of `TrainingSession`."""

    _runtime: Runtime

    def loader(
        self,
        dataset: MapDataset | Stream | DataLoader[Any],
        batch_size: int | None = None,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        micro_batch: int | None = None,
        deterministic: bool = False,
        batch_range: tuple[int, int] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        sampler: IndexSampler | None = None,
        order: Callable[[int], Sequence[int]] | Literal["torch"] | None = None,
        worker_options: Mapping[str, Any] | None = None,
        options: LoaderOptions | None = None,
    ) -> SessionLoader:
        """Return the training data in batches, on the device; every sample exactly once per epoch.

        Iterate over it once in each epoch. For validation use a plain ``torch.utils.data.DataLoader``, on all processes
        or only on the first one.

        Parameters
        ----------
        dataset
            A map-style dataset (``len()`` and indexing), a `stream`, or a ``DataLoader`` over a map-style dataset, of
            which dataset, batch size, sampler, ``drop_last``, ``collate_fn`` and workers are used. Its ``shuffle=True``
            means the session's own order, and its ``generator`` is seeded for each epoch if a sampler draws from it,
            unless ``order="torch"`` is given.
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
            is then always divided into the same parts, each with its own pass through the model, summed in order.
        batch_range
            The smallest and the largest batch size. The driver then chooses the batch size within it, by the speed and
            the noise of the gradient; training begins with `batch_size`, to which the learning rate belongs. No batch
            is larger than the dataset.
        num_workers
            Processes that fetch samples; 0: this process.
        collate_fn
            Merges a list of samples into a batch; torch's function by default.
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
            ``multiprocessing_context``, ``persistent_workers`` (otherwise each epoch has new ones).
        options
            Options that few training jobs need.

        Raises
        ------
        UsageError
            The dataset is not map-style, it yields no batch, its batches cannot be divided (a ``DataLoader`` with a
            batch sampler of its own or none, or over an ``IterableDataset``), or an option is wrong.
        CheckpointMismatch
            The newest checkpoint belongs to another dataset or batch size.
        """
        if isinstance(dataset, DataLoader):
            given = {
                "batch_size": batch_size,
                "num_workers": num_workers,
                "collate_fn": collate_fn,
                "sampler": sampler,
                "drop_last": drop_last,
                "worker_options": worker_options,
            }
            found, own = parts_of(dataset)
            own |= {name: value for name, value in given.items() if value}
            own["shuffle"] = own["shuffle"] and shuffle
            if order == "torch" and sampler is not None:
                raise UsageError("session.loader: order='torch' keeps the DataLoader's sampler: no sampler=…")
            if order == "torch":
                own["sampler"] = torch_order_like(dataset, **own)
            elif order is not None and sampler is None:
                own.pop("sampler", None)
            return self.loader(
                found,
                **own,
                micro_batch=micro_batch,
                deterministic=deterministic,
                batch_range=batch_range,
                order=None if order == "torch" else order,
                options=options,
            )
        options = options or LoaderOptions()
        if batch_size is None:
            raise UsageError("session.loader: give batch_size=…, the samples in a batch over all processes")
        for name, number in (
            ("batch_size", batch_size),
            ("micro_batch", micro_batch),
            ("shards", options.shards),
            ("ramp", options.ramp),
            ("num_workers", num_workers),
        ):
            if number is not None:
                check_whole(f"session.loader: {name}", number, least=0 if name == "num_workers" else 1)
        check_dataset(dataset, batch_size, shuffle=shuffle, drop_last=drop_last)
        check_worker_options(worker_options or {}, num_workers)
        seed = self._runtime.options.seed
        sampler = chosen_sampler(sampler, order, dataset, batch_size, seed, shuffle=shuffle, drop_last=drop_last)
        if deterministic and options.scaled:
            raise UsageError("session.loader: deterministic=True needs a batch of fixed size: no scaled=True")
        if batch_range is not None:
            batch_range = check_batch_range(batch_range, batch_size)
            check_fixed_size(deterministic=deterministic, scaled=options.scaled, drop_last=drop_last)
        lr_scaling = chosen_lr_scaling(options.lr_scaling, elastic=batch_range is not None, scaled=options.scaled)
        plan = Order(
            len(dataset),
            batch_size,
            seed,
            shuffle=shuffle,
            drop_last=drop_last,
            micro_batch=micro_batch,
            shards=options.shards if deterministic else None,
            scaled=options.scaled,
            drawn=None if sampler is None else len(sampler),
            batch_range=batch_range,
        )
        plan = self._runtime.planned(plan)
        if isinstance(sampler, TorchOrder):
            self._runtime.at_start.append(sampler.begin)
        self._runtime.use(plan, lr_scaling=lr_scaling, ramp=options.ramp)
        return SessionLoader(
            self._runtime,
            dataset,
            plan,
            num_workers=num_workers,
            collate_fn=collate_fn,
            seed_samples=options.seed_samples,
            sampler=sampler,
            worker_options=worker_options or {},
        )

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

    def staged(self, name: str | Path) -> Path:
        """Return where to read a file or directory that the app's `stage` names.

        ::

            @training_app(stage=["data/train.npz"])
            def train(session):
                images = np.load(session.staged("data/train.npz"))["images"]

        On a node, this is a copy on its own storage, which the first caller makes and which all processes of the node
        share: it is not to be changed. It is the path itself in `run_local`, and where a node has no room, which the
        log then says.

        Parameters
        ----------
        name
            As in `stage`.

        Raises
        ------
        UsageError
            `stage` does not name it.
        """
        return local_path(name, self._runtime.options)
