"""Checking a training function: which processes run, one after another, and what is compared."""

from __future__ import annotations

import inspect
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # torch's optimizers import it: once here, not in each process

from freetrain_parsl.errors import UsageError
from freetrain_parsl.extensions.checking.comparisons import reason_for_gap
from freetrain_parsl.extensions.checking.findings import Judge
from freetrain_parsl.extensions.checking.processes import Call, Processes
from freetrain_parsl.extensions.checking.recorder import BATCHES
from freetrain_parsl.extensions.checking.records import ProcessRecord, Variant
from freetrain_parsl.extensions.checking.report import CheckReport, short_place
from freetrain_parsl.storage.checked_code import note_checked
from freetrain_parsl.training.checkpoints.code.code_identity import code_of
from freetrain_parsl.training.signature import bind_call, check_signature

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Checker", "call_of", "check"]

LIMIT = 120.0
"""Seconds for the plain run; others, compared with it, have less."""
_GRACE, _SLOWNESS = 5.0, 20.0  # seconds, and how much longer than the plain run a group may take
_FEW_STEPS = 4
_MOST_PROCESSES = 4  # they share the cores of this host


def check(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> CheckReport:
    """Check whether the results of a training function depend on how it is moved; ``print`` the report.

    It is run for at most twelve steps in several small groups of processes on this host: stopped and resumed, on two
    and three processes, with one that joins, with one that fails, and in an array. Their states are compared at each
    step, and what differs is traced to a variable, a tensor or a line. Needs no cluster, and no GPU.

    Parameters
    ----------
    function
        A training function or app. It must not send anything to the outside, as it runs about a dozen times.
    args, kwargs
        Its arguments, without the session: those of a small training job.

    Returns
    -------
    report
        ``report.holds`` tells whether all comparisons hold, ``report.causes`` why not.

    Raises
    ------
    UsageError
        This process has used a GPU already, so that it cannot be forked.
    InvalidApp
        The function has no parameter for the session.
    TypeError
        The function does not accept the arguments.
    """
    return Checker(call_of(function, *args, **kwargs)).run()


def call_of(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Call:
    """Return the call of a training function or app; raises the errors of `check`."""
    plain = getattr(function, "training_function", function)
    check_signature(plain)
    bind_call(getattr(plain, "__name__", "the function"), inspect.signature(plain), args, kwargs)
    if not hasattr(function, "training_function"):
        return Call(plain, args, kwargs)
    options = function.request("check").options  # type: ignore[attr-defined]  # it is an app
    return Call(plain, args, kwargs, seed=options.seed, epochs=options.epochs)


class Checker:
    """Checks one call of a training function.

    The plain run may take `limit` seconds. With `double` it computes in float64, if the function runs in it.
    """

    def __init__(
        self,
        call: Call,
        *,
        limit: float = LIMIT,
        double: bool = True,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._call = call
        self._limit = limit
        self._double = double
        self._progress = progress
        code = getattr(inspect.unwrap(call.function), "__code__", None)
        self._file = "" if code is None else code.co_filename
        where = "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
        self.report = CheckReport(getattr(call.function, "__name__", "the function"), where)
        self._base = Variant()
        self._processes: Processes

    def run(self) -> CheckReport:
        """Run all variants and return the report.

        Raises
        ------
        UsageError
            This process has used a GPU already.
        """
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
            raise UsageError(
                "check: this process has used a GPU, so that it cannot be forked; check before that, or in a shell: "
                "freetrain check FILE.py:FUNCTION"
            )
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="freetrain-check-", ignore_cleanup_errors=True) as scratch:
            self._processes = Processes(self._call, Path(scratch))
            self._check()
        self.report.seconds = time.monotonic() - began
        code = code_of(self._call.function)
        note_checked(code.digest, code.name)
        return self.report

    def _check(self) -> None:
        self._progress("one process")
        plain = self._run_plain()
        if plain.count is not None:
            self.report.failure = (
                f"The check compares with one process, which the model does not allow: {plain.count.reason}."
            )
            return
        if plain.error:
            place = f" ({short_place(plain.trace)})" if plain.trace else ""
            self.report.failure = f"{plain.error}{place}"
            return
        if not plain.made:
            self.report.failure = "It made no step: session.step(loss) was never called in the loop over the batches."
            return
        self._limit = min(self._limit, _GRACE + _SLOWNESS * plain.seconds)
        steps = len(plain.made)
        at = min(BATCHES + BATCHES // 2, max(1, steps // 2)) if steps >= _FEW_STEPS else 1
        judge = Judge(self.report, plain, self._file, at)
        judge.look_at_plain()
        self._progress("stopped and resumed")
        self._check_resume(judge, at)
        two = self._check_members(judge, plain)
        if two is not None and not judge.hangs:
            self._progress("a process that joins")
            judge.joined(self._run({"grow_at": at}, {"rank": 1, "size": 2, "joins": True}), two)
        if plain.sharded:  # after a failure it is resumed, and it is in no array
            return
        if not judge.hangs:
            self._progress("a process that fails")
            self._check_failure(judge, plain, at)
        self._progress("two members of one array")
        (fused,) = self._run({"fused": True})
        judge.fused(fused, plain)

    def _run_plain(self) -> ProcessRecord:
        """Run one process: in float64 and cut short if the function allows it."""
        first: ProcessRecord | None = None
        for double in (True, False) if self._double else (False,):
            for whole in (False, True):  # the function may check how far it has come
                self._base = Variant(double=double, whole=whole)
                (record,) = self._run({})
                if not record.error:
                    return record
                first = first or record
                if record.refused or record.hangs:
                    break
        assert first is not None, "there was one"
        return first

    def _check_resume(self, judge: Judge, at: int) -> None:
        directory = self._processes.directory()
        (first,) = self._run({"pause_at": at}, directory=directory)
        (second,) = self._run({}, directory=directory)
        judge.resumed(first, second)

    def _check_members(self, judge: Judge, plain: ProcessRecord) -> list[ProcessRecord] | None:
        """Run groups of two and three, or of other numbers that the model allows; return that of two."""
        reference = plain
        if judge.depends_on_share:
            (reference,) = self._run({"steady": True})
        two = None
        sizes, compared = [2, 3], False
        for size in sizes:  # it grows
            self._progress(f"{size} processes")
            group = self._group(size)
            if (count := group[0].count) is not None:
                judge.refused(size, count)
                sizes += [other for other in range(sizes[-1] + 1, _MOST_PROCESSES + 1) if other in count.allowed][:1]
                continue
            two, compared = group if size == 2 else two, True
            steady = self._group(size, steady=True) if judge.depends_on_share else group
            gap = judge.members(size, group, reference, steady)
            if gap is not None and judge.needs_reason(gap):
                options = {"steady": judge.depends_on_share, "scalars": True, "leave_at": gap.number + 1}
                (alone,) = self._run(options)
                judge.add([reason_for_gap(gap, reference, steady, alone, self._group(size, **options))])
            if judge.hangs:
                return None
        if not compared:
            judge.without_groups(sizes)
        return two

    def _check_failure(self, judge: Judge, plain: ProcessRecord, at: int) -> None:
        reference = plain
        if judge.depends_on_share:
            (reference,) = self._run({"steady": True})
        survivor, _ = self._group(2, fail_at=at, steady=judge.depends_on_share)
        judge.failed(survivor, reference)

    def _group(self, size: int, **options: Any) -> list[ProcessRecord]:
        return self._run(*({"rank": rank, "size": size, **options} for rank in range(size)))

    def _run(self, *options: dict[str, Any], directory: Path | None = None) -> list[ProcessRecord]:
        variants = [replace(self._base, **each) for each in options]
        return self._processes.run(variants, self._limit, directory)
