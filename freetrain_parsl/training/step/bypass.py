"""Detects training that bypasses the session: steps without synchronization and metrics.

A plain ``loss.backward(); optimizer.step()`` runs without an error in each process, but every process then trains its
own model, and nothing is counted or saved. An optimizer that steps a prepared parameter outside `session.step` raises
an error at that call. What may be correct (a backward pass for adversarial examples, an optimizer for a linear probe)
is counted, and raises an error if the training job ends without a step of the session.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.checkpoints.format import is_spread
from freetrain_parsl.training.step.closure import usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch
    from torch import nn

_REPLACEMENT = "replace loss.backward(), optimizer.step() and optimizer.zero_grad() with session.step(loss)"
_OTHER_LOOPS = "the training loop of a library, such as Trainer.train(), runs in a session only with its adapter"
_UNPREPARED_STEPS = 100  # maximum before `session.prepare`, so that a loop that never calls it does not run for hours


_in_loop: list[BypassCheck] = []
_add_param_group = Optimizer.add_param_group


def _checked(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
    _add_param_group(optimizer, param_group)
    for check in _in_loop:
        check.check_group(optimizer)


class BypassCheck:
    """Watches the optimizers of this process, and the backward passes on the prepared parameters.

    `close` removes its hooks.

    Parameters
    ----------
    applies
        Returns whether the code that runs is that of the session's function: training jobs may take turns in a process.
    """

    def __init__(self, applies: Callable[[], bool]) -> None:
        self._applies = applies
        self._parameters: dict[int, nn.Parameter] = {}
        self.is_in_session = False
        """Whether the session itself computes gradients or makes a step."""
        self._optimizer_steps = 0  # of optimizers without prepared parameters
        self._optimizer = ""  # the last of those
        self._passes = 0  # backward passes outside the session in this epoch
        self._passes_before = 0  # the same in earlier epochs
        self.passes_in_batch = 0
        """Gradients that backward passes of the user's code have added in this batch."""
        self._gets_from_session: dict[nn.Parameter, bool] = {}  # of optimizers that are not prepared, once these step
        self._prepared: list[Optimizer] = []
        self._hooks = [register_optimizer_step_pre_hook(self._before_step)]

    @classmethod
    def is_own_hook(cls, hook: object) -> bool:
        """Return whether a hook of all optimizers is one of these watches, and not the user's."""
        return isinstance(hook, MethodType) and isinstance(hook.__self__, cls)

    def begin_loop(self, objects: Iterable[object]) -> None:
        """Refuse from now on further optimizers of the watched parameters, which no step of the session would use."""
        self._prepared = [thing for thing in objects if isinstance(thing, Optimizer)]
        if not _in_loop:
            Optimizer.add_param_group = _checked  # type: ignore[assignment, method-assign]
        _in_loop.append(self)

    def close(self) -> None:
        """Stop watching."""
        if self in _in_loop:
            _in_loop.remove(self)
        if not _in_loop:
            Optimizer.add_param_group = _add_param_group  # type: ignore[method-assign]
        for hook in self._hooks:
            hook.remove()

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Watch these parameters from now on."""
        new = {id(parameter): parameter for parameter in parameters if id(parameter) not in self._parameters}
        self._parameters |= new
        for parameter in new.values():
            if parameter.requires_grad and not is_spread(parameter):  # FSDP2 sets the gradients of these itself
                hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]  # torch's
                self._hooks.append(hook)

    @contextmanager
    def acting(self, *, session: bool) -> Iterator[None]:
        """Mark steps and backward passes of the session itself; or code of the user inside a step of the session."""
        before, self.is_in_session = self.is_in_session, session
        try:
            yield
        finally:
            self.is_in_session = before

    def before_backward(self) -> None:
        """Check that the session's backward pass does not add to gradients of the user's code.

        Raises
        ------
        UsageError
            The prepared parameters have gradients of a plain ``loss.backward()``.
        """
        if self.passes_in_batch and self._has_gradients():
            raise UsageError(
                "loss.backward() was called before session.step(loss) in the same batch: its gradients would be added "
                "without the other processes; write session.backward(loss), then clip or read the gradients, then "
                "session.step(); sum several losses before it, or set the gradients to zero in between"
            )
        self.passes_in_batch = 0

    def begin_batch(self) -> None:
        """Note that the user's code gets a batch, or a piece of one."""
        self.passes_in_batch = 0

    def end_batch(self) -> None:
        """Check how a batch was trained on, when the next one is requested.

        Raises
        ------
        UsageError
            It was trained on with a plain ``loss.backward()``.
        """
        if self.passes_in_batch and self._has_gradients():
            raise UsageError(
                "a batch of session.loader() was trained on with loss.backward() and without session.step(): "
                f"{_REPLACEMENT}; to accumulate gradients over several batches, use session.loader(micro_batch=…)"
            )

    def end_pass(self, epoch: int, batches: int, *, trained: bool) -> None:
        """Check an epoch after its last batch.

        Raises
        ------
        UsageError
            No batch was trained on.
        """
        if not trained:
            raise UsageError(
                f"epoch {epoch}: session.step() was called for none of the {batches} batches of session.loader(): "
                f"{_REPLACEMENT}; for validation, use a torch.utils.data.DataLoader"
            )

    def end_epoch(self, epoch: int, *, trained: bool) -> None:
        """Check an epoch.

        Raises
        ------
        UsageError
            There were backward passes, but not by the session.
        """
        if self._passes and not trained:
            raise UsageError(
                f"epoch {epoch}: loss.backward() was called on the model of session.prepare(), but session.step() was "
                f"not: take the batches from session.loader(), and {_REPLACEMENT}"
            )
        self._passes_before, self._passes = self._passes_before + self._passes, 0

    def end_training(self, steps: int) -> None:
        """Check a training job whose function has returned.

        Raises
        ------
        UsageError
            There were steps or backward passes, but not by the session.
        """
        if steps == 0 and (self._optimizer_steps or self._passes or self._passes_before):
            seen = f"{self._optimizer}.step()" if self._optimizer_steps else "loss.backward()"
            raise UsageError(
                f"the training function called {seen}, but never session.step(): each process would have trained by "
                f"itself; pass model and optimizer to session.prepare(), and {_REPLACEMENT}; {_OTHER_LOOPS}"
            )

    def check_group(self, optimizer: Optimizer) -> None:
        """Check the optimizer that has got parameters in the loop; raises UsageError if no step would use it."""
        known = any(optimizer.param_groups is each.param_groups for each in self._prepared)  # or a wrapper of it
        if known or self.is_in_session or not self._applies():
            return
        if any(id(parameter) in self._parameters for parameter in optimizer.param_groups[-1]["params"]):
            name = type(optimizer).__name__
            raise UsageError(
                f"{name} has got parameters of the prepared model in the loop, and session.step() steps only the "
                "optimizers of session.prepare: add the parameters to one of those with add_param_group, or prepare "
                "both optimizers before the loop, and choose with session.step(loss, optimizer=…)"
            )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.is_in_session or not self._applies():
            return
        name = type(optimizer).__name__
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        own = [p for p in parameters if id(p) in self._parameters]
        if own and (kwargs.get("closure") or len(args) > 1):  # the first one is the optimizer
            raise UsageError(f"{name}.step(closure) was called outside session.step(): {usage(optimizer)}")
        if any(parameter.grad is not None for parameter in own):  # without gradients the step has no effect
            raise UsageError(
                f"{name}.step() was called outside session.step(): each process would train by itself; "
                f"{_REPLACEMENT}; {_OTHER_LOOPS}"
            )
        self._check_strange(name, [p for p in parameters if id(p) not in self._parameters])
        if not own:
            self._optimizer_steps += 1
            self._optimizer = name
            if self._optimizer_steps >= _UNPREPARED_STEPS and not self._parameters:
                raise UsageError(
                    f"{self._optimizer_steps} steps of {name} were made before session.prepare(): each process would "
                    f"train by itself; pass model and optimizer to session.prepare(), and {_REPLACEMENT}; "
                    f"{_OTHER_LOOPS}"
                )

    def _check_strange(self, name: str, parameters: list[nn.Parameter]) -> None:
        """Check that parameters which the session does not know get no gradients in its backward passes.

        They are watched from the first step of their optimizer on.
        """
        if any(self._gets_from_session.get(p) and p.grad is not None for p in parameters):
            raise UsageError(
                f"{name}.step() was called for parameters that session.prepare does not know, with gradients of a loss "
                "of session.step(): they are those of this process's share of the batch, and neither saved nor sent to "
                f"processes that join; pass the {name} to session.prepare, and the model of its parameters, if there "
                "is one"
            )
        for parameter in parameters:
            if parameter not in self._gets_from_session and parameter.requires_grad and self._parameters:
                self._gets_from_session[parameter] = False
                hook = parameter.register_post_accumulate_grad_hook(self._on_strange_gradient)  # type: ignore[no-untyped-call]  # torch's
                self._hooks.append(hook)

    def _on_strange_gradient(self, parameter: torch.Tensor) -> None:
        self._gets_from_session[parameter] = self.is_in_session  # type: ignore[index]  # hooks are on parameters only

    def _on_gradient(self, parameter: torch.Tensor) -> None:  # noqa: ARG002 - torch's signature
        if not self.is_in_session:
            self._passes += 1
            self.passes_in_batch += 1

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters.values())
