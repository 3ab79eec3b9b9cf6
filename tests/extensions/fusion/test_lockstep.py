"""Functions in lockstep."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from freetrain_parsl.extensions.fusion.engine.lockstep import Lockstep, Meeting, Strand
from freetrain_parsl.training.data.random_streams import seed_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def run(*functions: Callable[[Lockstep], None]) -> None:
    lockstep = Lockstep()
    for number, function in enumerate(functions):
        lockstep.add(str(number), lambda function=function: function(lockstep))  # type: ignore[misc]
    lockstep.run()


def numbered(order: int, kind: str, log: list[Any]) -> Meeting:
    def work(strands: Sequence[Strand]) -> None:
        log.append((kind, [strand.name for strand in strands]))
        for strand in strands:
            strand.result = strand.item * 10

    return Meeting(order, kind, work, item=order + 1)


def test_work_is_done_once_when_all_wait_for_it() -> None:
    log: list[Any] = []

    def function(lockstep: Lockstep) -> None:
        log.append("begin")
        assert lockstep.meet(numbered(0, "a", log)) == 10
        log.append("end")

    run(function, function, function)
    assert log == ["begin"] * 3 + [("a", ["0", "1", "2"])] + ["end"] * 3


def test_those_that_are_behind_are_served_first() -> None:
    log: list[Any] = []

    def two(lockstep: Lockstep) -> None:
        lockstep.meet(numbered(0, "a", log))
        lockstep.meet(numbered(1, "b", log))

    def one(lockstep: Lockstep) -> None:
        lockstep.meet(numbered(1, "b", log))

    run(one, two)
    assert log == [("a", ["1"]), ("b", ["0", "1"])]


def test_one_that_ends_is_not_waited_for_and_a_new_one_takes_part() -> None:
    log: list[Any] = []
    lockstep = Lockstep()

    def long() -> None:
        for _ in range(3):
            lockstep.meet(numbered(0, "a", log))

    def short() -> None:
        lockstep.meet(numbered(0, "a", log))
        lockstep.add("new", short_again)

    def short_again() -> None:
        lockstep.meet(numbered(0, "a", log))

    lockstep.add("long", long)
    lockstep.add("short", short)
    lockstep.run()
    assert log == [("a", ["long", "short"]), ("a", ["long", "new"]), ("a", ["long"])]


def test_an_error_of_the_work_is_raised_where_it_is_waited_for() -> None:
    raised: list[str] = []

    def fail(_strands: Sequence[Strand]) -> None:
        raise ValueError("as asked")

    def function(lockstep: Lockstep) -> None:
        try:
            lockstep.meet(Meeting(0, "a", fail))
        except ValueError as error:
            raised.append(str(error))

    run(function, function)
    assert raised == ["as asked", "as asked"]


def test_an_interruption_unwinds_all_functions() -> None:
    unwound: list[str] = []

    def interrupt(lockstep: Lockstep) -> None:
        lockstep.meet(Meeting(0, "a", lambda _strands: None))
        raise KeyboardInterrupt

    def wait(lockstep: Lockstep) -> None:
        try:
            lockstep.meet(Meeting(0, "a", lambda _strands: None))
            lockstep.meet(Meeting(0, "a", lambda _strands: None))
        finally:
            unwound.append("here")

    with pytest.raises(KeyboardInterrupt):
        run(wait, wait, interrupt)
    assert unwound == ["here", "here"]


def test_each_function_has_its_own_random_numbers_and_modes() -> None:
    """Of torch, numpy and Python, as if it ran alone; grad mode and autocast, too."""

    def draws(seed: int, lockstep: Lockstep | None) -> list[Any]:
        seed_all(seed)
        found: list[Any] = []
        for step in range(6):
            found += [torch.rand(1).item(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]
            if step % 2:
                found += [np.random.rand(), random.random(), np.random.normal()]  # noqa: NPY002
            with torch.set_grad_enabled(seed % 2 == 0), torch.autocast("cpu", enabled=seed == 2):
                if lockstep is not None:
                    lockstep.meet(Meeting(0, "a", lambda _strands: None))
                found += [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]
        return found

    for seeds in ((1, 2, 3), (4, 4, 4)):
        found: dict[int, list[Any]] = {}

        def function(number: int, seed: int, found: dict[int, list[Any]]) -> Callable[[Lockstep], None]:
            return lambda lockstep: found.update({number: draws(seed, lockstep)})

        run(*(function(number, seed, found) for number, seed in enumerate(seeds)))
        assert [found[number] for number in range(3)] == [draws(seed, None) for seed in seeds]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("drawing", [(0,), (1,), (0, 2), (1, 2)])
def test_draws_of_some_functions_do_not_reach_the_others(drawing: tuple[int, ...]) -> None:
    """Also if all have the same seed, so that generators that nobody has used need not be exchanged."""

    def draws(number: int, lockstep: Lockstep | None) -> list[float]:
        found: list[float] = []
        for step in range(5):
            seed_all(3, step)
            if number in drawing:
                found += [torch.rand(1).item(), np.random.rand(), random.random()]  # noqa: NPY002
            if number in drawing and step == 2:  # seeded by hand
                np.random.seed(number)  # noqa: NPY002
                random.seed(number)
            if lockstep is not None:
                lockstep.meet(Meeting(0, "a", lambda _strands: np.random.rand() + random.random()))  # type: ignore[arg-type, return-value]  # noqa: NPY002
            if step % 2 == 0:
                found += [torch.rand(1).item(), np.random.rand(), random.random()]  # noqa: NPY002
        return found

    found: dict[int, list[float]] = {}
    run(*(lambda lockstep, number=number: found.update({number: draws(number, lockstep)}) for number in range(3)))  # type: ignore[misc]
    assert [found[number] for number in range(3)] == [draws(number, None) for number in range(3)]
