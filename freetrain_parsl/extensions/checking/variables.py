"""Variables of the user's code that begin anew in a process that joins or resumes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.extensions.checking.report import Finding, short_place
from freetrain_parsl.extensions.checking.sources import Source, Use, last_assignment, last_assignment_of_global

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from freetrain_parsl.extensions.checking.comparisons import StateDifference
    from freetrain_parsl.extensions.checking.records import Frame, Leaf, Place, ProcessRecord

__all__ = ["Suspect", "VariableCauses", "base_of", "shown_path", "suspects_between"]

_PLAIN_CONTAINERS = ("dict", "list", "tuple", "deque", "Tensor", "Parameter", "array", "set", "")
_TENSORS = ("Tensor", "Parameter", "array")
_KINDS = {"global": "a global variable", "default": "kept between calls"}


@dataclass(frozen=True)
class Suspect:
    """Something in the user's frames that differs: its path, where in the data, and both digests."""

    path: str
    place: Place
    one: Leaf
    other: Leaf

    @property
    def frame(self) -> str:
        """The qualified name of the function, ``global`` or ``default``."""
        return self.path.removeprefix("len(").partition("|")[0]

    @property
    def name(self) -> str:
        """The variable."""
        return base_of(self.path).partition("|")[2]

    @property
    def is_part(self) -> bool:
        """Whether it is a part of what the variable holds."""
        return shown_path(self.path) != self.name


def shown_path(path: str) -> str:
    """Return a path as it is shown: without the frame."""
    prefix, _, rest = path.rpartition("|")
    return ("len(" if prefix.startswith("len(") else "") + rest


def base_of(path: str) -> str:
    """Return the frame and the variable of a path: ``train|meter`` of ``train|meter.sum``."""
    frame, _, rest = path.removeprefix("len(").partition("|")
    return f"{frame}|{re.split(r'[].:)[]', rest, maxsplit=1)[0]}"


def suspects_between(
    one: ProcessRecord, other: ProcessRecord, *, after: Place, without: Collection[str]
) -> dict[str, Suspect]:
    """Return what differs between the frames of two processes, the first difference of each variable.

    One has continued, the other began anew `after` this place, where the loop's own variables are not bound yet. Paths
    in `without` differ between two runs in any case, such as clocks.
    """
    found: dict[str, Suspect] = {}
    for place in sorted(one.held.keys() & other.held.keys()):
        if place <= after:
            continue
        for path, leaf in one.held[place].items():
            theirs = other.held[place].get(path)
            if theirs is not None and path not in without and theirs.bits != leaf.bits:
                found.setdefault(base_of(path), Suspect(path, place, leaf, theirs))
    return found


class VariableCauses:
    """Tells which of the suspects are causes, and what to do about them; `file` is that of the training function."""

    def __init__(self, frames: Iterable[Frame], file: str) -> None:
        self._frames = {frame.name: frame for frame in frames}
        self._sources = {name: Source(frame) for name, frame in self._frames.items()}
        self._files = {file, *(frame.file for frame in self._frames.values())}
        self._outermost = list(self._frames)[-1] if self._frames else ""

    def findings(
        self,
        suspects: Mapping[str, Suspect],
        effect: StateDifference | None,
        at: int,
        *,
        known: Collection[str] = (),
    ) -> list[Finding]:
        """Return the causes, most probable first.

        A variable is a cause if a round of the loop reads what an earlier one has left, if it counts batches, or if it
        changes without being assigned in the loop. Others are consequences, and so is what differs only after the
        parameters do.

        The other process began after `at` steps; `effect` is the first difference of the session's state; variables
        whose names are `known` are explained otherwise.
        """
        roots = [
            suspect
            for base, suspect in suspects.items()
            if suspect.name not in known and not self._is_named_otherwise(base, suspects) and self._is_root(suspect)
        ]
        first = min((suspect.place for suspect in roots), default=None)
        roots.sort(key=lambda each: (each.place, self._weight(each)))
        # What reaches nothing has not changed the state if something else has.
        explained = effect if not any(map(self._uses, roots)) else None
        return [
            self._finding(
                suspect,
                effect if suspect.is_part or self._uses(suspect) else explained,
                at,
                sure=suspect.place == first,
            )
            for suspect in roots
            if effect is None or suspect.place <= effect.place or suspect.place == first
        ]

    def unchanged(self, plain: ProcessRecord, known: Collection[str]) -> list[Finding]:
        """Return notes of variables that are carried from round to round, and had one value in all steps of `plain`.

        A patience counter, while each epoch is better than the one before, differs in no comparison. Names in
        `known` are explained otherwise.
        """
        values: dict[str, set[bytes]] = {}
        for held in plain.held.values():
            for path, leaf in held.items():
                values.setdefault(path, set()).add(leaf.bits)
        found = []
        last = plain.held[max(plain.held)] if plain.held else {}
        for path, leaf in last.items():
            suspect = Suspect(path, max(plain.held), leaf, leaf)
            variable = self._sources[suspect.frame].look_up(suspect.name) if suspect.frame in self._sources else None
            if variable is None or suspect.is_part or suspect.name in known or len(values[path]) > 1:
                continue
            if leaf.norm is not None and variable.carried and variable.in_loop and self._uses(suspect):
                where = self._where(suspect)
                mend = self._mend(suspect, counts=False).partition("; or")[0]
                text = (
                    f"`{suspect.name}` ({short_place(where)}) was {leaf.text} at every step, so that no comparison "
                    "shows whether it begins anew in a process that joins or resumes; as a local variable, it does."
                )
                found.append(Finding("variable", text, suspect.name, where, (), mend, note=True))
        return found

    def _is_named_otherwise(self, base: str, suspects: Mapping[str, Suspect]) -> bool:
        """Return whether it is the variable of a function that is a suspect itself: ``weight:it`` and ``it``."""
        suspect = suspects[base]
        inner = suspect.path.rpartition(":")[2] if ":" in suspect.path else ""
        return bool(inner) and f"{suspect.frame}|{inner}" in suspects

    def _is_root(self, suspect: Suspect) -> bool:
        if suspect.frame in _KINDS:
            return True
        source = self._sources.get(suspect.frame)
        if source is None or not source.known:
            return source is not None
        variable = source.look_up(suspect.name)
        return variable.carried or variable.counts or not variable.in_loop

    def _weight(self, suspect: Suspect) -> tuple[bool, bool]:
        source = self._sources.get(suspect.frame)
        certain = suspect.frame in _KINDS or suspect.is_part or (source is not None and self._carried(suspect))
        return not certain, not self._uses(suspect)

    def _carried(self, suspect: Suspect) -> bool:
        source = self._sources.get(suspect.frame)
        return source is not None and source.look_up(suspect.name).carried

    def _uses(self, suspect: Suspect) -> list[Use]:
        name = self._outermost if suspect.frame == "global" else suspect.frame
        source = self._sources.get(name)
        return [] if source is None else source.uses(suspect.name)

    def _where(self, suspect: Suspect) -> str:
        shown = shown_path(suspect.path).removeprefix("len(").rstrip(")")
        owner, _, attribute = shown.partition(".")
        if attribute.isidentifier():
            found = last_assignment(self._files, attribute, {owner, "self"}, suspect.one.of)
            if found:
                return found
        if suspect.frame == "global":
            return last_assignment_of_global(self._files, suspect.name)
        frame = self._frames.get(suspect.frame)
        if frame is None:
            return ""
        line = self._sources[suspect.frame].look_up(suspect.name).line
        return f"{frame.file}:{line}" if line else ""

    def _finding(self, suspect: Suspect, effect: StateDifference | None, at: int, *, sure: bool) -> Finding:
        shown, uses, where = shown_path(suspect.path), self._uses(suspect), self._where(suspect)
        source = self._sources.get(suspect.frame)
        counts = source is not None and source.look_up(suspect.name).counts
        of_library = suspect.one.of not in _PLAIN_CONTAINERS and suspect.is_part and not uses
        harmless = effect is None and not uses and (not suspect.is_part or of_library)
        what = "counts batches, and" if counts else ""
        text = " ".join(
            filter(
                None,
                (
                    f"`{shown}`",
                    f"({short_place(where)})" if where else "",
                    f"is {_KINDS[suspect.frame]}, and" if suspect.frame in _KINDS else what,
                    "begins anew in a process that joins or resumes",
                ),
            )
        )
        if suspect.one.text != suspect.other.text:
            text += f": {suspect.other.text} instead of {suspect.one.text}"
        text += f", one step after step {at}." if sure else f", after step {at}."
        details = []
        if uses:
            details.append(f"It reaches {', '.join(f'{use.what} (line {use.line})' for use in uses)}.")
        if effect is not None:
            details.append(f"Then {effect.sentence()}.")
        elif harmless:
            details.append("It reaches no loss, learning rate, log or result.")
        mend = "" if harmless else self._mend(suspect, counts=counts)
        return Finding("variable", text, suspect.name, where, tuple(details), mend, note=harmless)

    def _mend(self, suspect: Suspect, *, counts: bool) -> str:
        if counts:
            return (
                "session.position.samples // batch_size is the number of the batch in its epoch, "
                'session.metrics["steps"] that of the step'
            )
        of = suspect.one.of
        if of == "generator":
            return (
                "draw from the global generator of torch, numpy or Python, which the session seeds for each batch, or "
                "make one from session.position in each round"
            )
        if of == "iterator":
            return 'compute it from session.metrics["steps"] or session.position, or keep its count in session.state'
        if of not in _PLAIN_CONTAINERS and "[" in shown_path(suspect.path):
            return (
                f"pass `{suspect.name}` to session.prepare, which saves and sends it; an average of parameters as "
                "torch.optim.swa_utils.AveragedModel"
            )
        key = self._key(suspect)
        initial = self._initial(suspect, key)
        mend = f"state = session.state({key}={initial}) before the loop, and state.{key} in its place"
        if of in _TENSORS or "[" in shown_path(suspect.path):
            mend += ", changed under `if session.step(loss):`"  # an average must not take a batch twice
        if suspect.one.text.isdigit() and not suspect.is_part:
            mend += '; or session.metrics["steps"], the number of the step'
        return mend

    def _key(self, suspect: Suspect) -> str:
        """Return a name for `session.state`: the attribute of ``self.it``."""
        shown = shown_path(suspect.path).removeprefix("len(").rstrip(")")
        parts = re.split(r"[.:]", shown)
        return parts[1] if len(parts) == len(("self", "it")) and parts[1].isidentifier() else suspect.name

    def _initial(self, suspect: Suspect, key: str) -> str:
        source = self._sources.get(suspect.frame)
        return (source.look_up(key).initial if source is not None else "") or "…"
