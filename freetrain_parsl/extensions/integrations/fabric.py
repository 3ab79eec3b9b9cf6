"""Lightning Fabric inside a session: ``SessionFabric(session)`` in place of ``Fabric()``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.utils.data import DataLoader

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.data.loader_options import check_whole
from freetrain_parsl.training.step.learning_rate import check_schedulers

try:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import SingleDeviceStrategy
except ImportError:
    raise ImportError("the package lightning is not installed: pip install 'freetrain-parsl[lightning]'") from None

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

    from freetrain_parsl.training.checkpoints.state import Stateful
    from freetrain_parsl.training.session import TrainingSession
    from freetrain_parsl.training.step.loss_kind import Reduction

__all__ = ["SessionFabric"]

_PRECISIONS: Final = ("32-true", "bf16-mixed")


class SessionFabric(Fabric):  # type: ignore[misc]  # Lightning is not read by mypy
    """Fabric with the session's processes; a script changes in two lines.

    ``fabric = Fabric(...)`` becomes ``fabric = SessionFabric(session)``, and ``for epoch in range(n)`` becomes ``for
    epoch in fabric.epochs(n)``. The first DataLoader that is set up is that of the training job; its batch size, times
    `accumulate`, is that over all processes. Other DataLoaders yield all of their data in each process.

    Parameters
    ----------
    session
        The session.
    accumulate
        Micro-batches in a batch, in place of an accumulation in the script: its loop stays that without accumulation.
    precision
        As for Fabric: ``"32-true"`` or ``"bf16-mixed"``.
    callbacks, loggers
        As for Fabric.
    options
        Other options of Fabric are refused: the session decides on devices, processes and how they communicate.

    Raises
    ------
    UsageError
        An argument is not supported.
    """

    def __init__(
        self,
        session: TrainingSession,
        *,
        accumulate: int = 1,
        precision: Any = None,
        callbacks: Any = None,
        loggers: Any = None,
        **options: Any,
    ) -> None:
        if options:
            name = next(iter(options))
            mend = "; call fully_shard(…, mesh=session.mesh) before fabric.setup" if name == "strategy" else ""
            raise UsageError(f"SessionFabric({name}=…) cannot be combined with a session{mend}")
        check_whole("SessionFabric: accumulate", accumulate, least=1)
        if precision not in (None, *_PRECISIONS):
            raise UsageError(f"SessionFabric: precision is one of {', '.join(_PRECISIONS)}, got {precision!r}")
        super().__init__(
            accelerator=session.device.type,
            devices=1,
            strategy=_FabricStrategy(session),
            precision=precision,
            callbacks=callbacks,
            loggers=loggers,
        )
        self._session = session
        self._accumulate = accumulate
        self._objects: list[Any] = []  # the model and its optimizers, then everything else with a state
        self._wrapped: list[Any] = []  # the optimizers as the script knows them
        self._training: _TrainingLoader | None = None

    @property
    def world_size(self) -> int:
        """Number of processes that currently train together."""
        return self._session.world_size

    @property
    def global_rank(self) -> int:
        """Rank of this process among them."""
        return self._session.rank

    def setup(self, module: nn.Module, *optimizers: Optimizer, **options: Any) -> Any:
        """Set up a model with its optimizers; see `Fabric.setup`. Once, before `epochs`."""
        if self._objects:
            raise UsageError("SessionFabric.setup: call it once; pass further models and optimizers to fabric.epochs")
        if not optimizers:
            raise UsageError("SessionFabric.setup: pass the model with its optimizers: fabric.setup(model, optimizer)")
        scheduler = options.get("scheduler")
        self._objects = [module, *optimizers, *([] if scheduler is None else [scheduler])]
        prepared = super().setup(module, *optimizers, **options)
        self._wrapped = list(prepared[1 : 1 + len(optimizers)])
        return prepared

    def clip_gradients(self, *args: Any, **options: Any) -> Any:
        """See `Fabric.clip_gradients`; without effect if there are no gradients, as after the failure of a process."""
        return super().clip_gradients(*args, **options) if self._strategy.has_gradients else None

    def _setup_dataloader(self, dataloader: Any, *args: Any, **options: Any) -> Any:
        if self._training is not None or not isinstance(dataloader, DataLoader):
            return super()._setup_dataloader(dataloader, *args, **options)
        self._training = _TrainingLoader(dataloader)
        return self._training

    def epochs(self, count: int, *others: Stateful) -> Iterator[int]:
        """Yield the epochs that are not done, in place of ``range(count)``; a process that joins gets the state here.

        Parameters
        ----------
        count
            Epochs of the whole training job.
        others
            Everything else with a state: learning-rate schedulers, averaged models.

        Raises
        ------
        UsageError
            There is no model, optimizer or DataLoader yet.
        """
        if not self._objects or self._training is None:
            raise UsageError(
                "SessionFabric.epochs: call fabric.setup(model, optimizer) and setup_dataloaders before it"
            )
        model, optimizer, *more = self._objects
        known = [*more, *(other for other in others if not any(other is one for one in more))]
        check_schedulers([model, *self._wrapped, optimizer, *known])
        self._session.prepare(model, optimizer, *known)
        source = self._training.source
        if source.batch_size is None:
            raise UsageError("SessionFabric: the training DataLoader has no batch_size, or its own batch_sampler")
        size = source.batch_size * self._accumulate
        divided: dict[str, Any] = {} if self._accumulate == 1 else {"micro_batch": source.batch_size}
        self._training.batches = self._session.loader(source, batch_size=size, **divided)
        return self._session.epochs(count)

    def no_backward_sync(self, module: Any, enabled: bool = True) -> AbstractContextManager[None]:  # noqa: FBT001, FBT002 - as in Fabric
        """Refuse an accumulation by hand: the session divides batches."""
        if enabled:
            raise UsageError("SessionFabric divides batches itself: give SessionFabric(session, accumulate=…) instead")
        context: AbstractContextManager[None] = super().no_backward_sync(module, enabled)
        return context

    def load(self, *args: Any, **options: Any) -> Any:
        """Refuse to load a state: the session resumes by itself."""
        raise UsageError("SessionFabric.load is not supported: the session resumes from its own checkpoints")

    def load_raw(self, *args: Any, **options: Any) -> Any:
        """Refuse to load a state, likewise."""
        raise UsageError("SessionFabric.load_raw is not supported: the session resumes from its own checkpoints")


class _TrainingLoader:
    """The training DataLoader: the session's batches, once the epochs have begun."""

    def __init__(self, source: DataLoader[Any]) -> None:
        self.source = source
        self.batches: Any = None

    def __len__(self) -> int:
        return len(self.source if self.batches is None else self.batches)

    def __iter__(self) -> Iterator[Any]:
        if self.batches is None:
            raise UsageError("SessionFabric: iterate over the training data inside `for epoch in fabric.epochs(…)`")
        return iter(self.batches)


class _FabricStrategy(SingleDeviceStrategy):  # type: ignore[misc]  # as above
    """Leaves gradients, steps and what concerns all processes to the session."""

    def __init__(self, session: TrainingSession) -> None:
        super().__init__(device=session.device)
        self._session = session
        self._optimizers: list[Optimizer] = []
        self.has_gradients = True
        """Whether the last backward pass completed a batch."""

    @property
    def is_global_zero(self) -> bool:
        return self._session.is_main_process

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._optimizers.append(optimizer)
        return optimizer

    def backward(
        self,
        tensor: torch.Tensor,
        module: Any,
        *args: Any,
        items: torch.Tensor | float | None = None,
        reduction: Reduction | None = None,
        **kwargs: Any,
    ) -> None:
        if args or kwargs:
            raise UsageError(f"SessionFabric.backward takes a loss, items and reduction only, got {[*args, *kwargs]}")
        self.has_gradients = self._session.backward(tensor, items=items, reduction=reduction)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if kwargs.get("closure") is not None:
            raise UsageError("SessionFabric does not support optimizer.step(closure): call fabric.backward before it")
        return self._session.step(optimizer=optimizer if len(self._optimizers) > 1 else None)

    def all_reduce(self, tensor: torch.Tensor, group: Any = None, reduce_op: Any = "mean") -> torch.Tensor:
        if str(reduce_op).lower() not in ("mean", "avg", "sum"):
            raise UsageError(f"SessionFabric.all_reduce: reduce_op is 'sum' or 'mean', got {reduce_op!r}")
        values = tensor.detach().double().flatten()
        # With the number of processes: the group may change before the sum.
        total: torch.Tensor = self._session.all_reduce(torch.cat([values, values.new_ones(1)]))
        result = total[:-1] / (1 if str(reduce_op).lower() == "sum" else total[-1])
        return result.reshape(tensor.shape).to(tensor.dtype)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002 - as in Fabric
        raise UsageError("SessionFabric.all_gather is not supported, as processes come and go; use fabric.all_reduce")

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: processes wait for each other in each step."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if src != 0:
            raise UsageError(f"SessionFabric.broadcast: src must be 0, the first process, got {src}")
        return self._session.broadcast(obj)
