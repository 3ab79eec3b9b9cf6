"""Findings: what the records of a check's processes say about the function. Pure: no process, clock or torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.extensions.checking.comparisons import (
    StateDifference,
    first_difference,
    gradient_gap,
    place_text,
)
from freetrain_parsl.extensions.checking.records import CRASHED, Kind
from freetrain_parsl.extensions.checking.report import Comparison, Finding, percent, short_place
from freetrain_parsl.extensions.checking.variables import VariableCauses, base_of, shown_path, suspects_between

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.extensions.checking.comparisons import GradientGap
    from freetrain_parsl.extensions.checking.records import ProcessRecord
    from freetrain_parsl.extensions.checking.report import CheckReport
    from freetrain_parsl.protocol.reports import CountRefused

__all__ = ["Judge"]

_EXACT = 1e-7  # of float64, after some steps
_COARSE = 2e-3  # of float32, in the first step
_CASTS = 3e-2  # with bfloat16
_DIFFER = "ReplicasDiffer"
_SAME_FILE = (
    "all processes run this line: if one writes a file while another reads it, let only the first write, under "
    "`if session.is_main_process:`, or keep its content in session.state"
)
_HALF_A_FILE = ("EOFError", "UnpicklingError", "BadZipFile", "JSONDecodeError")
_USUALLY = "; usually "  # between what differs and what to do about it
_LOST = ("PeerFailed", CRASHED)
_BY_SHARE = (Kind.STATISTICS, Kind.OWN)  # differ between processes by design


class Judge:
    """Compares records and writes what it finds into a report.

    `plain` is what one process recorded that was neither stopped nor joined, `file` that of the training function, and
    `at` the steps after which processes are stopped, join or fail.
    """

    def __init__(self, report: CheckReport, plain: ProcessRecord, file: str, at: int) -> None:
        self._report = report
        self._plain = plain
        self._at = at
        self._variables = VariableCauses(plain.frames, file)
        self._casts = any(step.graph.casts for step in plain.steps[:1])
        self._double = plain.variant.double and not self._casts

    # ── one process ───────────────────────────────────────────────────────────────────────────────

    def look_at_plain(self) -> None:
        """Look at what one process shows by itself."""
        plain = self._plain
        if plain.batch_norm:
            names = ", ".join(plain.batch_norm[:3])
            self._report.notes.append(
                f"BatchNorm ({names}) normalizes over the share of each process, as in DistributedDataParallel; it was "
                "compared with its running statistics. session.loader(…, deterministic=True) makes it equal."
            )
        if self._draws:
            self._report.notes.append(
                "A step draws random numbers, as dropout does: others on another number of processes, as in "
                "DistributedDataParallel; it was compared with constants. session.loader(…, deterministic=True) makes "
                "them equal."
            )
        if not self._double:
            reason = (
                "It computes partly in float32, as the norms of language models do"
                if plain.variant.double
                else "It does not run in float64"
            )
            self._report.notes.append(f"{reason}: sums were compared in float32, and only in the first step.")
        if plain.sharded:
            self._report.notes.append(
                "The model is sharded over the processes. One that fails was not compared: the job then resumes from "
                "copies in memory or its checkpoint, or with replicas= continues without it."
            )

    @property
    def depends_on_share(self) -> bool:
        """Whether results differ by design between numbers of processes, so that these need constants."""
        return bool(self._plain.batch_norm) or self._draws

    @property
    def hangs(self) -> bool:
        """Whether processes waited for each other, so that further groups need not be tried."""
        return any(finding.kind == "hang" for finding in self._report.findings)

    @property
    def _draws(self) -> bool:
        return any(step.draws for step in self._plain.steps)

    # ── resume ────────────────────────────────────────────────────────────────────────────────────

    def resumed(self, first: ProcessRecord, second: ProcessRecord) -> None:
        """Judge a process that was stopped and the one that resumed: all bits must be those of the plain run."""
        name = f"one process, stopped after step {self._at} and resumed"
        for record, when in ((first, "Stopped with a checkpoint"), (second, "After a resume")):
            if record.error:
                self._row(name, f"fails: {_first_line(record.error)}", holds=False)
                self._error(record, when)
                return
        plain = self._plain
        unsteady = {
            path
            for place in first.held.keys() & plain.held.keys()
            for path in first.held[place].keys() & plain.held[place].keys()
            if first.held[place][path].bits != plain.held[place][path].bits
        }
        again = first_difference(plain, first)
        if again is not None:
            self._row(name, f"two runs in one process differ: {again.sentence()}", holds=False)
            self._find(
                "not repeatable",
                f"Two runs of the function with the same seed differ: {again.sentence()}.",
                again.name,
                details=(
                    "What it draws or reads is not the same each time: the clock, a generator without a seed, files.",
                ),
                mend="seed its own generators, or draw from those of torch, numpy and Python, which the session seeds",
            )
            return
        if not second.states:
            self._row(name, "nothing was left to do", holds=None)
            return
        effect = first_difference(plain, second)
        suspects = suspects_between(plain, second, after=min(second.states), without=unsteady)
        causes = self._variables.findings(suspects, effect, self._at)
        begins_anew = ", ".join(dict.fromkeys(f"`{cause.name}`" for cause in causes if not cause.note))
        if effect is not None:
            self._row(name, effect.sentence(), holds=False)
        elif begins_anew:
            self._row(name, f"the same steps, but {begins_anew} begins anew", holds=False)
        else:
            self._row(name, "same", holds=True)
        self.add(causes)
        self.add(self._variables.unchanged(plain, {cause.name for cause in causes}))
        if effect is not None and not self._has("variable", "buffer"):
            self._find(
                "resume",
                f"After a resume {effect.sentence()}; no variable of the function explains it.",
                effect.name,
                details=("Look for state in files, in objects of libraries, or in iterators made before the loop.",),
            )
        elif effect is None and not self._report.causes:
            self._compare_results(second)

    def _compare_results(self, second: ProcessRecord) -> None:
        one = {**self._plain.metrics, **self._plain.returned}
        other = {**second.metrics, **second.returned}
        for path, leaf in one.items():
            if path in other and other[path].bits != leaf.bits and "loss" not in path:
                self._find("result", f"After a resume {path} is {other[path].text} instead of {leaf.text}.", path)
                return

    # ── members ───────────────────────────────────────────────────────────────────────────────────

    def refused(self, size: int, count: CountRefused) -> None:
        """Note a number of processes that the model does not allow: a job has others."""
        self._row(f"{size} processes", f"not allowed: {count.reason}", holds=None)
        if size == 2:
            self._row("a process that joins", "not compared: the model does not allow two processes", holds=None)

    def without_groups(self, sizes: Sequence[int]) -> None:
        """Note that the model allows none of these numbers of processes."""
        tried = ", ".join(map(str, sizes))
        self._report.notes.append(
            f"No group of processes was compared: the model allows none of {tried} processes. Check it with other "
            "sizes of its layers, which these numbers divide."
        )

    def members(
        self, size: int, group: Sequence[ProcessRecord], reference: ProcessRecord, steady: Sequence[ProcessRecord]
    ) -> GradientGap | None:
        """Judge a group that was together from the start; return a difference of gradients of unknown cause.

        The processes of `group` have real random numbers and are compared with each other, by bits. `reference`, one
        process, and `steady`, the group, where nothing depends on the share, are compared with a tolerance.
        """
        name = f"{size} processes"
        when = f"On {name}"
        if self._failed(name, group, when) or self._failed(name, steady, when) or self._failed(name, [reference], when):
            return None
        differs = self._replicas(group)
        if differs is not None:
            self._row(name, f"they differ from each other: {differs.sentence()}", holds=False)
            return None
        tolerance = self._tolerance(reference)
        gap = gradient_gap(reference, steady[0], tolerance, steps=None if self._double else 1)
        if gap is not None:
            self._row(
                name,
                f"the gradient of step {gap.number + 1} differs by {percent(gap.share)} from that of one",
                holds=False,
            )
            return gap
        difference = None
        if self._double:
            difference = first_difference(reference, steady[0], tolerance, without=_BY_SHARE)
        if difference is None:
            alike = "as one, and all alike" if self._double else "as one in the first step, and all alike"
            self._row(name, alike, holds=True)
            return None
        self._row(name, f"as one in the gradients, but {difference.sentence()}", holds=False)
        if not self._has("variable", "hyperparameter", "buffer", "replicas"):
            self._find(
                "members",
                f"With {size} processes {difference.sentence()}, although the gradients are equal.",
                difference.name,
            )
        return None

    def _replicas(self, group: Sequence[ProcessRecord]) -> StateDifference | None:
        """Compare processes with each other; return the first difference."""
        first = group[0]
        found = [first_difference(first, other, without=_BY_SHARE) for other in group[1:]]
        differences = [each for each in found if each is not None]
        if not differences:
            return None
        difference = min(differences, key=lambda each: each.place)
        values = (
            f" ({difference.one.text} and {difference.other.text})"
            if difference.one.text != difference.other.text
            else ""
        )
        since = f"from {place_text(difference.place)} on"
        line = next((step.line for step in reversed(first.steps) if step.place < difference.place), "")
        if self._has("hyperparameter", "replicas"):
            return difference  # the same again
        if difference.kind is Kind.RATE:
            self._find(
                "hyperparameter",
                f"The processes use a different {difference.name}{values} {since}.",
                difference.name,
                line,
                details=(
                    "It was set from something that differs between them: session.rank, the loss of the own share.",
                ),
                mend="set it from session.metrics, session.position or session.broadcast(value)",
            )
        elif difference.kind is Kind.BUFFER:
            if not self._has("buffer"):
                self._find(
                    "buffer",
                    f"Buffer `{difference.name}` differs between processes {since}: each computes it from its share.",
                    difference.name,
                    line,
                    details=self._assigned_anew(difference.name),
                    mend="sum over the processes before it is used, as session.all_reduce(x.sum(0)) / "
                    "session.all_reduce(len(x))",
                )
        else:
            others = group[1]
            equal = all(
                name in step.gradients and step.gradients[name].bits == leaf.bits
                for step, other in zip(first.steps, others.steps, strict=False)
                if step.place < difference.place
                for name, leaf in other.gradients.items()
            )
            cause = (
                "Their gradients were equal: parameters or gradients are changed after backward or after the step, "
                "by random numbers, by the rank or by the own share."
                if equal
                else "Their gradients differ."
            )
            self._find(
                "replicas",
                f"`{difference.name}` differs between the processes {since}, after {short_place(line)}.",
                difference.name,
                line,
                details=(cause,),
                mend="draw such numbers from a generator seeded with session.position, the same on all processes",
            )
        return difference

    def _tolerance(self, reference: ProcessRecord) -> float:
        if self._double:
            return _EXACT
        return _CASTS if self._casts and not reference.variant.double else _COARSE

    # ── the loss ──────────────────────────────────────────────────────────────────────────────────

    def needs_reason(self, gap: GradientGap) -> bool:
        """Return whether a difference of gradients is not explained by what was found before."""
        if self._has("hyperparameter", "replicas", "buffer", "hang", "loss", "not repeatable"):
            return False
        return not (gap.number and self._has("variable"))

    # ── changes of the group ──────────────────────────────────────────────────────────────────────

    def joined(self, pair: Sequence[ProcessRecord], two: Sequence[ProcessRecord]) -> None:
        """Judge a process and one that joins it; `two` began together."""
        veteran, newcomer = pair
        name = f"a process that joins after step {self._at}"
        explained = self._has("variable", "hyperparameter", "replicas", "buffer")
        if self._failed(name, [newcomer, veteran], f"When a process joins after step {self._at}", explained=explained):
            return
        difference = first_difference(veteran, newcomer, without=_BY_SHARE)
        if difference is None:
            self._row(name, "as the others", holds=True)
        else:
            self._row(name, f"it differs from the other: {difference.sentence()}", holds=False)
        if not newcomer.held or self._has("hyperparameter", "replicas", "buffer"):
            return
        by_share = {
            base_of(path)
            for place in two[0].held.keys() & two[1].held.keys()
            for path in two[0].held[place].keys() & two[1].held[place].keys()
            if two[0].held[place][path].bits != two[1].held[place][path].bits
        }
        suspects = suspects_between(veteran, newcomer, after=min(newcomer.held), without=())
        known = {finding.name for finding in self._report.findings}
        own = {
            base: suspect for base, suspect in suspects.items() if base not in by_share and suspect.name not in known
        }
        self.add(self._variables.findings(own, None, self._at, known=known))
        if difference is not None and not explained and not self._report.causes:
            self._find(
                "members",
                f"When a process joins after step {self._at}, {difference.sentence()}.",
                difference.name,
            )

    def failed(self, survivor: ProcessRecord, reference: ProcessRecord) -> None:
        """Judge the process that repeats a batch after another one has failed in it."""
        name = f"a process that fails in step {self._at + 1}"
        if self._failed(name, [survivor], f"When another process fails in step {self._at + 1}"):
            return
        effect = first_difference(reference, survivor, self._tolerance(reference), without=_BY_SHARE)
        if not self._double:
            effect = None
        self._row(name, "as without" if effect is None else effect.sentence(), holds=effect is None)
        if self._has("hyperparameter", "replicas", "buffer", "loss"):
            return
        known = {finding.name for finding in self._report.findings}
        repeated = [each for each in self._counted_twice(survivor, reference) if each.name not in known]
        self.add(repeated)
        if effect is not None and not self._report.causes:
            self._find(
                "repeated",
                f"After another process has failed in step {self._at + 1}, {effect.sentence()}: the batch is repeated.",
                effect.name,
                mend="put what must run once per step under `if session.step(loss):`",
            )

    def _counted_twice(self, survivor: ProcessRecord, reference: ProcessRecord) -> list[Finding]:
        """Find whole numbers that count a repeated batch twice."""
        made = reference.made
        after = made[min(self._at, len(made) - 1)].place
        found: dict[str, tuple[str, int, int]] = {}
        for place in sorted(survivor.held.keys() & reference.held.keys()):
            for path, leaf in reference.held[place].items():
                other = survivor.held[place].get(path)
                if place > after and other is not None and leaf.text.isdigit() and other.text.isdigit():
                    ours, theirs = int(leaf.text), int(other.text)
                    if theirs > ours:
                        found.setdefault(base_of(path), (path, ours, theirs))
        return [
            Finding(
                "repeated",
                f"`{shown_path(path)}` is {theirs} instead of {ours} after another process has failed in a batch: "
                "the batch is repeated, and what follows session.step runs twice.",
                base.partition("|")[2],
                mend="change it under `if session.step(loss):`, or keep it in session.state",
                note=True,
            )
            for base, (path, ours, theirs) in found.items()
        ]

    def fused(self, member: ProcessRecord, reference: ProcessRecord) -> None:
        """Judge a member of an array whose other member has the same arguments."""
        name = "two members of one array"
        reason = next(iter(member.notes), "")
        if reason:
            self._row(name, f"not fused: {reason}", holds=None)
            return
        if self._failed(name, [member], "In an array"):
            return
        effect = first_difference(reference, member, _EXACT) if self._double else None
        self._row(name, "as one" if effect is None else effect.sentence(), holds=effect is None)
        if effect is None or self._report.causes:
            return
        suspects = suspects_between(reference, member, after=min(reference.states), without=())
        shared = [suspect for suspect in suspects.values() if suspect.frame in ("global", "default")]
        for suspect in shared[:1]:
            self._find(
                "array",
                f"`{shown_path(suspect.path)}` is shared by the members of an array, which run in one process: "
                f"{suspect.other.text} instead of {suspect.one.text}.",
                suspect.name,
                details=(f"Then {effect.sentence()}.",),
                mend="keep it in the function, or in session.state",
            )
        if not shared:
            self._find("array", f"In an array of two members {effect.sentence()}.", effect.name)

    # ── common ────────────────────────────────────────────────────────────────────────────────────

    def _failed(self, row: str, records: Sequence[ProcessRecord], when: str, *, explained: bool = False) -> bool:
        """Judge the errors of a group; return whether there are any. `explained`: why they differ is known."""
        bad = [record for record in records if record.error]
        if not bad:
            return False
        if all(record.hangs or record.error.startswith(_LOST) for record in bad):
            self._row(row, "they do not make the same calls", holds=False)
            ends = [self._end_of(number, record) for number, record in enumerate(records)]
            worst = next((record for record in bad if record.trace), bad[0])
            self._find(
                "hang",
                f"{when}, they do not make the same calls: {'; '.join(ends)}.",
                where=worst.trace,
                mend="leave the loop, skip a batch and call session.all_reduce for a reason that is the same on all "
                "processes: session.broadcast(value)",
            )
            return True
        worst = next((record for record in bad if not record.error.startswith(_LOST)), bad[0])
        if worst.error.startswith(_DIFFER):
            first = _what_differs(worst.error).partition(";")[0].partition(" (after")[0].partition(", and ")[0]
            self._row(row, f"they differ from each other: {first}", holds=False)
            if explained:
                return True
        else:
            self._row(row, f"fails: {_first_line(worst.error)}", holds=False)
        self._error(worst, when, first_difference(records[0], records[-1], without=_BY_SHARE))
        return True

    @staticmethod
    def _end_of(number: int, record: ProcessRecord) -> str:
        place = f" at {short_place(record.trace)}" if record.trace else ""
        if record.hangs:
            return f"process {number} waits{place}"
        if record.error.startswith("PeerFailed"):
            return f"process {number} lost the others{place}"
        return f"process {number} " + (f"{record.error}{place}" if record.error else "came to its end")

    def _error(self, record: ProcessRecord, when: str, difference: StateDifference | None = None) -> None:
        """Report an error of the function, in its own words; once, if the processes differ from each other."""
        place = f" ({short_place(record.trace)})" if record.trace else ""
        if not record.error.startswith(_DIFFER):
            interrupted = record.variant.fail_at is not None
            mend = (
                "put what needs the gradients or a step under `if session.backward(loss):` or `if session.step(loss):`"
            )
            if not interrupted:
                mend = _SAME_FILE if _reads_half_a_file(record) else ""
            self._find("error", f"{when}: {record.error}{place}", where=record.trace, mend=mend)
        elif not self._has("replicas", "buffer"):
            cause, _, mend = record.error.partition(_USUALLY)[2].partition(": ")
            name = "" if difference is None else difference.name
            self._find(
                "replicas",
                f"{when}{place} {_what_differs(record.error)}.",
                name,
                record.trace,
                details=(*self._assigned_anew(name), *((f"Usually {cause}.",) if cause else ())),
                mend=mend,
            )

    def _assigned_anew(self, name: str) -> tuple[str, ...]:
        """Return a sentence on a buffer that is assigned anew."""
        anew = ("buffer assigned", name) in self._plain.events
        return (f"`{name}` is assigned anew in the loop.",) if anew else ()

    def _has(self, *kinds: str) -> bool:
        return any(finding.kind in kinds for finding in self._report.causes)

    def _row(self, name: str, text: str, *, holds: bool | None) -> None:
        self._report.rows.append(Comparison(name, text, holds))

    def _find(
        self, kind: str, text: str, name: str = "", where: str = "", *, details: tuple[str, ...] = (), mend: str = ""
    ) -> None:
        self.add([Finding(kind, text, name, where, details, mend)])

    def add(self, findings: Sequence[Finding]) -> None:
        """Add findings to the report that are not there yet."""
        texts = {finding.text for finding in self._report.findings}
        self._report.findings.extend(finding for finding in findings if finding.text not in texts)


def _what_differs(error: str) -> str:
    """Return what is not the same on all processes, without who says so."""
    return error.partition(_USUALLY)[0].rpartition("agree: ")[2]


def _reads_half_a_file(record: ProcessRecord) -> bool:
    """Return whether an error is that of a file that another process of the group is writing."""
    reads = record.error.startswith(_HALF_A_FILE) or "PytorchStreamReader" in record.error
    return reads and (record.variant.size > 1 or record.variant.grow_at is not None)


def _first_line(error: str) -> str:
    return error.partition("\n")[0][:160]
