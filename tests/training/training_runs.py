"""Fragments of one training job in this process, with a fake clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from training_crew import Data, classify

from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import Progress
from freetrain_parsl.training.fragment import ControlMailbox, Finished, Membership, Paused, run_fragment

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.protocol.reports import Report


class Clock:
    """A fake clock, advanced by the test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Run:
    """Fragments of one training job in this process."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.clock = Clock()
        self.options = SessionOptions("net", root, **options)
        self.reports: list[Progress] = []
        self.mailbox = ControlMailbox(self.clock)

    def __call__(self, function: Any = classify, **kwargs: Any) -> Finished | Paused:
        self.mailbox = ControlMailbox(self.clock)
        return run_fragment(
            function,
            (),
            kwargs,
            options=self.options,
            membership=Membership("net"),
            meet=lambda membership: None,
            mailbox=self.mailbox,
            report=self._keep,
            clock=self.clock,
        )

    def _keep(self, report: Report) -> None:
        """Keep the progress; values for trackers are tested for themselves."""
        if isinstance(report, Progress):
            self.reports.append(report)

    def paused_after(self, step: int, **kwargs: Any) -> Paused:
        """Run until this step, then request a pause."""
        end = self(pausing(self, step), **kwargs)
        assert isinstance(end, Paused)
        return end


def pausing(run: Run, step: int) -> Any:
    """Return `classify`, with a pause request after a number of steps."""

    def function(session: Any, **kwargs: Any) -> Any:
        steps = session.step

        def step_and_notice(loss: torch.Tensor) -> None:
            steps(loss)
            if session.metrics["steps"] == step:
                run.mailbox.pause_requested.set()

        session.step = step_and_notice
        return classify(session, **kwargs)

    return function


def parameters(checkpoint: Path | None) -> dict[str, torch.Tensor]:
    assert checkpoint is not None
    return torch.load(checkpoint / "state.pt", weights_only=True)["objects"]["model"]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def loop(session: Any, epochs: int, batch_size: int = 8) -> Any:
    """Iterate over the batches of all epochs."""
    data = session.loader(Data(), batch_size)
    for _ in session.epochs(epochs):
        yield from data


def ticking(run: Run, seconds: float) -> Any:
    """Return `classify`, with steps of this duration on the run's clock."""

    def function(session: Any, **kwargs: Any) -> Any:
        steps = session.step

        def slow_step(loss: torch.Tensor) -> None:
            steps(loss)
            run.clock.now += seconds

        session.step = slow_step
        return classify(session, **kwargs)

    return function
