"""The training data: each sample exactly once per epoch, in an order independent of the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.data.loader_options import WORKER_OPTIONS
from freetrain_parsl.training.data.random_streams import mix, seed_all, seed_cpu
from freetrain_parsl.training.data.sampler import draw
from freetrain_parsl.training.data.stream import Stream
from freetrain_parsl.training.extension import DataSource

if TYPE_CHECKING:
    from freetrain_parsl.training.checkpoints.state import SessionState
    from freetrain_parsl.training.data.cursor import Cursor
    from freetrain_parsl.training.data.lazy_positions import Positions
    from freetrain_parsl.training.data.order import Batch, Order
    from freetrain_parsl.training.data.sampler import IndexSampler
    from freetrain_parsl.training.group.process_group import Group
    from freetrain_parsl.training.group.regrouping import GroupMember
    from freetrain_parsl.training.runtime import Runtime


class MapDataset(Protocol):
    """A map-style dataset, such as ``torch.utils.data.Dataset`` or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Any: ...


class SessionLoader:
    """Batches of a dataset, on the session's device; made by ``session.loader``.

    Iterate over it once in each of ``session.epochs``. After a pause, iteration resumes in the middle of the
    epoch. ``len(loader)`` is the number of batches in a whole epoch.
    """

    def __init__(
        self,
        runtime: Runtime,
        dataset: MapDataset | Stream,
        order: Order,
        *,
        num_workers: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        seed_samples: bool,
        sampler: IndexSampler | None = None,
        worker_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._sampler = sampler
        self._runtime = runtime
        self._cursor = runtime.state.cursor
        self._ended_epoch: int | None = None  # the last one whose batches ended in this process
        self._current: tuple[int, int, int] | None = None  # epoch, position and samples of the batch in hand
        self._plan = _Plan(runtime.members, self._cursor, runtime.state)
        self._fetched: Iterator[Any] | None = None
        self._workers_epoch: int | None = None  # in which the workers were started
        self._seeds = False  # whether the random numbers of a fetch have to be seeded
        self._gather = Gather.of(dataset, collate_fn, num_workers)
        self._generator = torch.Generator()
        options = dict(worker_options or {})
        self._keeps_workers = options.pop("persistent_workers", False)
        self._loader: DataLoader[Any] = DataLoader(
            _with_places(dataset, collate_fn, order.seed, seed_samples=seed_samples),
            batch_sampler=self._plan,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=runtime.device.type == "cuda",
            persistent_workers=num_workers > 0,
            generator=self._generator,
            **options,
        )
        source = DataSource(dataset, order, sampler, collate_fn, num_workers, seed_samples=seed_samples)
        self._source = None if options else runtime.extension.data(source)

    @property
    def order(self) -> Order:
        """The order of its samples."""
        order = self._runtime.state.order
        assert order is not None, "given to the runtime before"
        return order

    def __len__(self) -> int:
        size = self._runtime.state.batch_size if self._runtime.started else None
        return self.order.batches if size is None else -(-self.order.samples // size)

    def __iter__(self) -> Iterator[Any]:
        runtime, cursor, members = self._runtime, self._cursor, self._runtime.members
        self._check_usable()
        runtime.begin_pass()
        runtime.without_batches = cursor.pass_ended
        if cursor.pass_ended:
            runtime.seed()
            return
        self._leave_behind()
        if self._workers_epoch != cursor.epoch and not self._keeps_workers:
            # New workers get what the loop has changed in the dataset, as those of a plain DataLoader do.
            self._loader._iterator = None  # noqa: SLF001 - no public API
        self._workers_epoch = cursor.epoch
        positions = self._positions(cursor.epoch)
        samples = len(positions)
        self._fetched = None
        group, size = members.group, runtime.state.batch_size
        first = True
        while cursor.position < samples and not cursor.pass_ended:
            if not first:
                runtime.boundary(seed=False)  # here only a fetch may draw random numbers
            self._seeds, first = not first or cursor.position > 0, False
            if cursor.position >= samples:
                break  # the boundary loaded the state of a member that was ahead
            if members.group is not group or runtime.state.batch_size != size:
                group, size, self._fetched = members.group, runtime.state.batch_size, None
            yield from self._batch(positions)
        if not cursor.pass_ended:
            runtime.end_pass(positions)
            self._ended_epoch = cursor.epoch
        runtime.boundary()

    def _check_usable(self) -> None:
        self._runtime.check_running()
        if not self._runtime.started:
            raise UsageError(
                "iterate over the session's loader inside `for epoch in session.epochs(…)`, which continues where a "
                "training was interrupted; for N iterations, take enough epochs and end both loops when "
                '`session.metrics["steps"] >= N`'
            )
        if self._ended_epoch == self._cursor.epoch:
            raise UsageError(
                "the session's loader can be iterated over once per epoch; use a DataLoader for further passes"
            )

    def _leave_behind(self) -> None:
        """Advance past a batch that has been trained on, and whose loop was left: ``next(iter(data))``, ``break``."""
        batch_runner, cursor = self._runtime.batch_runner, self._cursor
        assert batch_runner is not None, "the loop has begun"
        if self._current is None:
            return
        epoch, position, samples = self._current
        if not (batch_runner.has_stepped or batch_runner.cut_off):
            if batch_runner.has_pieces and (cursor.epoch, cursor.position) == (epoch, position):
                raise UsageError(
                    "the loop over the session's loader was left between the micro-batches of a batch, and begun "
                    "again: write `for … in data:`, and not next(iter(data)), with micro_batch"
                )
            return
        self._current = None
        is_repeated = batch_runner.cut_off
        if is_repeated or (cursor.epoch, cursor.position) == (epoch, position):
            self._runtime.release()
            batch_runner.take_back()
            if is_repeated:
                batch_runner.leave_batch()
            else:
                cursor.pass_by(samples)
            self._runtime.boundary()

    def _positions(self, epoch: int) -> Positions:
        if self._sampler is None:
            return self.order.epoch(epoch)
        drawn, samples = draw(self._sampler, self.order.length, self.order.seed, epoch), self.order.samples
        return drawn[:samples] if isinstance(drawn, torch.Tensor) else drawn.first(samples)

    def _batch(self, positions: Positions) -> Iterator[Any]:
        """Yield this member's pieces of the current batch; stop at once if the batch is interrupted."""
        batch_runner, cursor, device = self._runtime.batch_runner, self._cursor, self._runtime.device
        assert batch_runner is not None, "the loop has begun"
        recorder = self._runtime.recorder
        group, size = self._runtime.members.group, self._runtime.state.batch_size
        given = None
        if self._source is not None:
            given = self._source.get(cursor.epoch, cursor.position, lambda: self._fetch_whole(positions, group))
        if given is None:
            self._source = None
            batch = self.order.batch(positions, cursor.position, group.rank, group.size, size)
            pieces = self._fetch(positions, batch)
        else:
            batch, pieces = given[0], iter([given[1]])
        batch_runner.open_batch(group, batch, device, done=cursor.steps)
        loop = self._runtime.state.loop
        loop.open_batch(group)
        self._runtime.join_attempt()
        self._current = cursor.epoch, cursor.position, batch.samples
        for piece in batch.pieces:
            data = next(pieces)
            batch_runner.hand_out(piece)
            seed_all(self.order.seed, cursor.epoch, cursor.position, piece.shard)
            try:
                yield data if recorder is None else recorder.batch(data)
            except GeneratorExit:
                batch_runner.is_left = True
                raise
            self._runtime.release()
            batch_runner.take_back()
            if batch_runner.cut_off:
                batch_runner.leave_batch()
                self._fetched = None
                return
        cursor.pass_by(batch.samples)

    def _fetch(self, positions: Positions, batch: Batch) -> Iterator[Any]:
        """Yield the data of a batch's pieces, on the device."""
        cursor = self._cursor
        if self._gather is not None and self._gather.is_possible:  # draws no random numbers
            self._fetched = None
            for piece in batch.pieces:
                yield self._gather(piece.positions, self._runtime.device)
            return
        if self._seeds:
            self._runtime.seed()
        if self._fetched is None or self._plan.next != cursor.position:
            # In another group, or after an interrupted step, the fetched samples are no longer this member's part.
            self._plan.start(positions, cursor.position)
            # A separate generator: torch draws the workers' seed at each start; the global one must not advance.
            self._generator.manual_seed(mix(self.order.seed, cursor.epoch, cursor.position))
            self._fetched = iter(self._loader)
        self._plan.next = cursor.position + batch.samples
        for _ in batch.pieces:
            yield to_device(next(self._fetched), self._runtime.device)

    def _fetch_whole(self, positions: Positions, group: Group) -> tuple[Batch, Any]:
        batch = self.order.batch(positions, self._cursor.position, group.rank, group.size)
        (data,) = self._fetch(positions, batch)
        return batch, data


class Gather:
    """Fetches the batches of a ``TensorDataset`` as its samples would be fetched and collated, bit for bit."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset
        self._plain: tuple[torch.Tensor, ...] | None = None  # the tensors of the dataset, if they were found to be so

    @classmethod
    def of(cls, dataset: object, collate_fn: object, num_workers: int) -> Gather | None:
        """Return the one for a loader; ``None`` if code other than torch's makes its samples or batches, or workers."""
        if type(dataset) is not TensorDataset or collate_fn is not None or num_workers:
            return None
        return cls(dataset)

    @property
    def is_possible(self) -> bool:
        """Whether the batches can be fetched like this: user code may replace or change the dataset's tensors."""
        tensors: object = self._dataset.tensors
        if self._plain is None or tensors is not self._plain:
            if not (isinstance(tensors, tuple) and all(map(_is_plain, tensors))):  # a list can change
                return False
            self._plain = tensors
        return not any(tensor.requires_grad for tensor in self._plain)

    def __call__(self, positions: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
        """Return the batch of the samples at `positions` (int64), on a device."""
        batch = [tensor.index_select(0, positions) for tensor in self._dataset.tensors]
        if device.type == "cpu":
            return batch
        return [tensor.pin_memory().to(device, non_blocking=True) for tensor in batch]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in the CPU's memory, with contiguous samples, so that a batch is contiguous, too."""
    ordinary = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    usual = ordinary and not (tensor.is_quantized or tensor.is_nested)
    return usual and len(tensor) > 0 and tensor[0].is_contiguous()


class _Plan:
    """Batch sampler of this process: its pieces of each batch from a given position on, as (epoch, position) pairs."""

    def __init__(self, members: GroupMember, cursor: Cursor, state: SessionState) -> None:
        self._members = members
        self._cursor = cursor
        self._state = state
        self._positions: Positions = torch.empty(0, dtype=torch.int64)
        self._begin = 0
        self.next = 0
        """Start of the batch whose pieces come next."""

    def start(self, positions: Positions, begin: int) -> None:
        """Start at sample `begin` of an epoch with these positions, in the current group."""
        self._positions, self._begin, self.next = positions, begin, begin

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        group, epoch, begin = self._members.group, self._cursor.epoch, self._begin
        order, size = self._state.order, self._state.batch_size
        assert order is not None, "there is a loader"
        while begin < len(self._positions):
            batch = order.batch(self._positions, begin, group.rank, group.size, size)
            for piece in batch.pieces:
                yield [(epoch, position) for position in piece.positions.tolist()]
            begin += batch.samples


def _with_places(dataset: MapDataset | Stream, collate_fn: object, seed: int, *, seed_samples: bool) -> Any:
    """Return an object that fetches samples by (epoch, position); it need not be a torch Dataset."""
    if isinstance(dataset, Stream):
        return _Streamed(dataset, seed)
    if type(dataset) is TensorDataset and collate_fn is None:  # draws no random numbers
        return _Plain(dataset)
    return _Seeded(dataset, seed) if seed_samples else _Plain(dataset)


class _Plain:
    """A dataset that ignores the epoch of a position."""

    def __init__(self, dataset: MapDataset) -> None:
        self._dataset = dataset

    def __getitems__(self, places: list[tuple[int, int]]) -> Any:
        positions = [position for _, position in places]
        if hasattr(self._dataset, "__getitems__"):
            return self._dataset.__getitems__(positions)
        return [self._dataset[position] for position in positions]


class _Seeded:
    """A dataset whose samples draw the same random numbers in an epoch, whichever process fetches them, and when."""

    def __init__(self, dataset: MapDataset, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitems__(self, places: list[tuple[int, int]]) -> list[Any]:
        samples = []
        for epoch, position in places:
            seed_cpu(self._seed, epoch, position)
            samples.append(self._dataset[position])
        return samples


class _Streamed:
    """A stream, which seeds each sample itself, including those it drops."""

    def __init__(self, stream: Stream, seed: int) -> None:
        self._stream = stream
        self._seed = seed

    def __getitems__(self, places: list[tuple[int, int]]) -> list[Any]:
        return self._stream.fetch(self._seed, places[0][0], [position for _, position in places])


def check_dataset(dataset: object, batch_size: int, *, shuffle: bool, drop_last: bool) -> None:
    """Reject data that cannot be divided exactly.

    Raises
    ------
    UsageError
        The dataset is not map-style or is empty, yields no batch, or is a stream that is to be shuffled.
    """
    if isinstance(dataset, Stream):
        if shuffle:
            raise UsageError("session.loader: a stream has one order; use shuffle=False, and shuffle in its source")
    elif isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"session.loader needs a dataset with len() and indexing, got {type(dataset).__name__}; "
            "for a stream: session.loader(session.stream(source, samples=…), …)"
        )
    if len(dataset) == 0:
        raise UsageError("session.loader: the dataset is empty")
    if drop_last and len(dataset) < batch_size:
        raise UsageError(f"session.loader: drop_last leaves no batch of {batch_size} in {len(dataset)} samples")


def parts_of(loader: DataLoader[Any]) -> tuple[MapDataset, dict[str, Any]]:
    """Return the dataset of a user's DataLoader and the arguments of ``session.loader`` that correspond to it.

    Raises
    ------
    UsageError
        Its batches cannot be divided over processes.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "session.loader: the DataLoader reads an IterableDataset; use "
            "session.loader(session.stream(source, samples=…), batch_size=…, shuffle=False)"
        )
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        kind = "none" if batches is None else f"a {type(batches).__name__}"
        raise UsageError(
            f"session.loader: the DataLoader has a batch_sampler of its own ({kind}), which cannot be divided; pass "
            "the dataset, batch_size=… and sampler=… for the order of single samples"
        )
    sampler = batches.sampler
    options: dict[str, Any] = {
        "batch_size": batches.batch_size,
        "drop_last": batches.drop_last,
        "num_workers": loader.num_workers,
        "collate_fn": None if loader.collate_fn is default_collate else loader.collate_fn,
        "shuffle": isinstance(sampler, RandomSampler),
    }
    workers = {name: value for name in WORKER_OPTIONS if (value := getattr(loader, name, None))}
    if loader.num_workers and workers:
        options["worker_options"] = workers
    plain = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]  # it has a length
    )
    if not plain:
        options["sampler"] = sampler
    return loader.dataset, options  # type: ignore[return-value]  # map-style


def check_dropped(loader: DataLoader[Any], accumulated: int) -> None:
    """Check that ``drop_last`` leaves out the same samples of a DataLoader whose batches are accumulated.

    A trainer leaves out an incomplete batch of the DataLoader, and makes a smaller last step of the remaining ones. The
    session leaves out the whole step.

    Raises
    ------
    UsageError
        More samples would be left out.
    """
    batches = loader.batch_sampler
    if isinstance(batches, BatchSampler) and batches.drop_last and (rest := len(batches) % accumulated):
        raise UsageError(
            f"drop_last cannot be combined with the accumulation of {accumulated} batches here: of {len(batches)} "
            f"batches in an epoch, the last {rest} would be left out, too; set drop_last to False, or change the "
            "number of samples or accumulated batches"
        )


def to_device(data: Any, device: torch.device) -> Any:
    """Move the tensors in nested tuples, lists and dictionaries; leave everything else as it is."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, Mapping):
        return {key: to_device(value, device) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device) for value in data))
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        return type(data)(to_device(value, device) for value in data)  # type: ignore[call-arg]  # list or tuple
    return data
