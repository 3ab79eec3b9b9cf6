"""Ways to disturb a trainer's training, and comparison with one that nothing disturbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from training_crew import run_member

from freetrain_parsl.training.fragment import Finished, Membership, Paused

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

ROUNDING = 2e-5  # of sums in float32, in another order


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference between the weights."""
    assert one["weights"].keys() == other["weights"].keys()
    return max(
        float((one["weights"][name].double() - value.double()).abs().max()) for name, value in other["weights"].items()
    )


def value_of(outcome: Any) -> dict[str, Any]:
    assert outcome is not None
    assert isinstance(outcome.end, Finished), outcome.error
    value: dict[str, Any] = outcome.end.value
    return value


def alone(function: Any, root: Path, **options: Any) -> dict[str, Any]:
    return value_of(run_member(function, options, root=root, membership=Membership("net")))


def restarted(function: Any, root: Path, pause_at: int, **options: Any) -> dict[str, Any]:
    """Pause in the middle of an epoch, and train to the end in another fragment."""
    first = run_member(function, {"pause_at": pause_at, **options}, root=root, membership=Membership("net"))
    assert isinstance(first.end, Paused), first.error
    return alone(function, root, **options)


def regrouped(crew: Crew, function: Any, root: Path, sizes: tuple[int, ...], **options: Any) -> list[dict[str, Any]]:
    """Change the number of processes at steps 4, 8, …; return the values of those at the end."""
    gates = {4 * (number + 1): root / f"gate-{number}" for number in range(len(sizes) - 1)}
    root.mkdir(exist_ok=True)
    run = crew.start(sizes[0], root / "run", function, gates=gates, **options)
    for size, gate in zip(sizes[1:], gates.values(), strict=True):
        run.regroup(size, release=gate.touch)
    return [value_of(outcome) for outcome in run.outcomes()]


def killed(crew: Crew, function: Any, root: Path, die_at: int, **options: Any) -> dict[str, Any]:
    """Kill the second of two processes in a step; return the value of the other."""
    outcomes = crew.start(2, root, function, die_at=die_at, **options).outcomes()
    return value_of(outcomes[0])


def assert_weights(one: dict[str, Any], other: dict[str, Any], within: float = ROUNDING) -> None:
    assert distance(one, other) <= within
    assert all(torch.isfinite(value).all() for value in one["weights"].values() if value.is_floating_point())
