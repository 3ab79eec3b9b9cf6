"""The code blocks of the documentation pages on PyTorch habits and ports, as training jobs.

In a separate module because the processes of the crew import it.
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import training_crew

if TYPE_CHECKING:
    from collections.abc import Iterator

_HOWTO = Path(__file__).parents[2] / "docs" / "howto"
PAGE = _HOWTO / "pytorch-habits.md"
PORTS = {page.stem: page for page in sorted((_HOWTO / "port").glob("*.md")) if page.stem != "index"}
_BLOCK = re.compile(r"<!-- (?:habit|port): (\w+) -->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks_of(page: Path) -> dict[str, str]:
    """Return the marked code blocks of a page by name."""
    return dict(_BLOCK.findall(page.read_text(encoding="utf-8")))


BLOCKS = blocks_of(PAGE)
COMMON = BLOCKS.pop("common")
HELD = "held"


def practise(
    session: Any, habit: str, hold_at: int | None = None, die_at: int | None = None
) -> tuple[Any, list[tuple[int, int]]]:
    """Run a block of the page; see `hold`.

    Returns
    -------
    value
        Return value of the block's function.
    sizes
        (step, number of processes) for each step that this process made.
    """
    train = defined(PAGE, habit, COMMON, BLOCKS[habit])
    sizes = hold(session, hold_at, die_at)
    return train(session), sizes


def practise_port(session: Any, port: str, **disturbance: Any) -> tuple[Any, list[tuple[int, int]]]:
    """Run the port of a script in float64; `disturbance` and results are those of `practise`."""
    with float64():
        blocks = blocks_of(PORTS[port])
        train = defined(PORTS[port], port, blocks["common"], blocks["session"])
        sizes = hold(session, **disturbance)
        return train(session), sizes


def run_plain(port: str) -> Any:
    """Run the plain script of a page in float64, and return what it returns."""
    with float64():
        blocks = blocks_of(PORTS[port])
        return defined(PORTS[port], port, blocks["common"], blocks["plain"])()


def defined(page: Path, name: str, *blocks: str) -> Any:
    """Return the function `train` that blocks of a page define."""
    names: dict[str, Any] = {"__name__": name}
    for block in blocks:
        exec(compile(block, page, "exec"), names)  # trusted: part of this repository
    return names["train"]


@contextmanager
def float64() -> Iterator[None]:
    """Make float64 the default, so that rounding is below any difference that matters."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def assert_close(one: Any, other: Any, tolerance: float, where: str = "state") -> None:
    """Compare nested states."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_close(one[key], other[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (mine, others) in enumerate(zip(one, other, strict=True)):
            assert_close(mine, others, tolerance, f"{where}[{index}]")
    elif isinstance(one, torch.Tensor):
        assert torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance), where
    else:
        assert one == (pytest.approx(other, rel=tolerance, abs=tolerance) if isinstance(one, float) else other), where


def hold(
    session: Any,
    hold_at: int | None = None,
    die_at: int | None = None,
    *,
    die_between: bool = False,
    pause_at: frozenset[int] = frozenset(),
) -> list[tuple[int, int]]:
    """After step `hold_at`, wait for a command; kill the second process in the step after `die_at`; pause after steps.

    With `die_between` it is killed in the second step of a batch.

    Returns
    -------
    sizes
        Receives (step, number of processes) for each step of this process.
    """
    sizes: list[tuple[int, int]] = []
    step, backward = session.step, session.backward

    def die_if_asked() -> None:
        is_asked = session.metrics["steps"] == die_at and session._runtime.batch_runner.has_stepped == die_between
        if is_asked and session.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # while the others wait for its gradients, or soon will

    def backward_or_die(loss: Any, **options: Any) -> bool:
        die_if_asked()
        return backward(loss, **options)

    def step_and_hold(*args: Any, **options: Any) -> bool:
        if args:  # a loss
            die_if_asked()
        made = step(*args, **options)
        if made:
            sizes.append((session.metrics["steps"], session.world_size))
        if made and session.metrics["steps"] == hold_at:
            (session.directory / HELD).touch()
            while training_crew.NOTICE.pending is None:
                time.sleep(0.005)
        if made and session.metrics["steps"] in pause_at:
            training_crew.NOTICE.pause_requested.set()
        return made

    session.step, session.backward = step_and_hold, backward_or_die
    return sizes
