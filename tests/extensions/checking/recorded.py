"""Records as processes of a check leave them, made by hand."""

from __future__ import annotations

from typing import Any

from freetrain_parsl.extensions.checking.records import (
    Graph,
    Kind,
    Leaf,
    Place,
    ProcessRecord,
    RecordedStep,
    Value,
    Variant,
)

LINE = "train.py:20"
BATCH = 16


def number(value: float, of: str = "") -> Leaf:
    """Return the digest of a number."""
    return Leaf(repr(value).encode(), f"{value:g}", abs(value), (value,), of)


def place(step: int) -> Place:
    """Return the place after a step of the first epoch."""
    return (0, False, step * BATCH, 0)


def training(steps: int = 6, *, size: int = 1, first: int = 0, **changes: Any) -> ProcessRecord:
    """Return the record of a process whose weight is the number of its steps; it begins after `first` of them."""
    record = ProcessRecord(Variant(size=size), **changes)
    for step in range(first, steps + 1):
        record.states[place(step)] = {
            "model.weight": Value(number(float(step)), Kind.PARAMETER, "model"),
            "lr of the optimizer": Value(number(0.1), Kind.RATE, "lr"),
        }
        record.held[place(step)] = {}
    record.steps = [
        RecordedStep(
            place(step),
            LINE,
            1.0,
            1.0 / size,
            draws=False,
            graph=Graph(),
            gradients={"model.weight": number(1.0)},
            made=True,
        )
        for step in range(first, steps)
    ]
    return record


def change(record: ProcessRecord, step: int, name: str, value: float, kind: Kind = Kind.PARAMETER) -> ProcessRecord:
    """Change a part of the state from a step on."""
    for where, states in record.states.items():
        if where >= place(step):
            states[name] = Value(number(value), kind, name)
    return record


def hold(record: ProcessRecord, path: str, values: dict[int, Leaf]) -> ProcessRecord:
    """Let a variable of the user's frames have these values after these steps."""
    for step, leaf in values.items():
        record.held[place(step)][path] = leaf
    return record
