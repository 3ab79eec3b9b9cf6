"""An adversary: collections whose listings lie, whose answers lie, and whose tasks lie; and drivers that are killed.

Creating and renaming take effect as they do on a file system, unless a lie is about them. Everything is drawn from one
seed, so a history can be repeated: ``LyingHistory(path, seed).run()``.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from freetrain_parsl.errors import CollectionUnavailable, GlobusRefused
from freetrain_parsl.extensions.globus.storage.carrier import step_of
from freetrain_parsl.extensions.globus.storage.collections import CollectionPath, CopyItem, GlobusSettings, TaskState
from freetrain_parsl.extensions.globus.storage.mover import Mover
from freetrain_parsl.extensions.globus.storage.mover_directory import MoverPace
from freetrain_parsl.storage.entry import Entry
from freetrain_parsl.storage.home import ResultStatus
from freetrain_parsl.storage.posix import CheckpointDirectory

HOME = "cccccccc-0000-4000-8000-000000000000"
SITES = {name: f"{digit * 8}-0000-4000-8000-000000000000" for name, digit in (("a", "1"), ("b", "2"), ("d", "3"))}
LEASE = 900.0

_ARABIC = "\u0660" * 9 + "\u0661"  # digits to Python

HOSTILE = [
    "..", ".", "", "/", "a/b", "../../../outside", "gen-9999999999/../..", "x\ny", "\x1b[31mred", "\udcff", "NUL\0",
    "gen-9999999999", "gen--000000001", f"gen-{_ARABIC}", "gen-1", "gen-0000000000", f"step-{_ARABIC}",
    "step-" + "9" * 5000, "step-" + "9" * 18, "step-0000000001-\u0663", "step-00000000001", "step-0000000007\n",
    "manifest.json ", "net.gen-9999999999", "net.gen-0000000003.by-", "net.gen-0000000002.by-ffff",
    "../../outside.gen-0000000001.by-a1", "driver-a1.beat-9999999999", f"driver-ffff.beat-{_ARABIC}",
    "NET.gen-0000000001", "🜂" * 90,
]  # fmt: skip
"""Names that a listing may show beside those that are there."""

LIES = (
    "stale", "omit", "twice", "removed", "partial", "hostile", "many", "another", "nothing", "back", "missing",
    "unavailable", "refused", "endless", "file", "sizes", "slow", "mkdir", "rename", "task", "truncated", "twice-task",
    "manifest", "phantom", "phantom",
)  # fmt: skip


@dataclass
class LyingDisks:
    """Directories that play collections, and all that their listings have ever shown.

    Parameters
    ----------
    top
        Where they are: one directory for each collection, named by its first character.
    draw
        Of the history.
    clock
        Seconds.
    lies
        Those that are told at present.
    """

    top: Path
    draw: random.Random
    clock: list[float]
    lies: set[str] = field(default_factory=set)
    tasks: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    submissions: dict[str, str] = field(default_factory=dict)
    past: dict[tuple[str, str], list[tuple[float, list[str]]]] = field(default_factory=dict)
    asked: dict[str, list[float]] = field(default_factory=dict)
    told: dict[str, set[str]] = field(default_factory=dict)  # checkpoints listed to each driver with a manifest
    harm: list[str] = field(default_factory=list)

    def path(self, collection: str, path: str) -> Path:
        """Return the directory; a path that leaves what a driver may name is noted."""
        allowed = ("/ft",)
        if ".." in PurePosixPath(path).parts or not path.startswith(allowed) or not path.isprintable():
            self.harm.append(f"a request for {path!r}")
        return self.top.joinpath(collection[0], *(part for part in PurePosixPath(path).parts[1:] if part != ".."))

    def lie(self, *names: str, chance: float = 0.3) -> str:
        """Return a lie to tell, or nothing."""
        told = [name for name in names if name in self.lies]
        return self.draw.choice(told) if told and self.draw.random() < chance else ""


class LyingCollections:
    """What `Collections` does, as one driver sees it."""

    def __init__(self, disks: LyingDisks, driver: str) -> None:
        self._disks = disks
        self._driver = driver

    def _request(self) -> None:
        disks = self._disks
        disks.asked.setdefault(self._driver, []).append(disks.clock[0])
        lie = disks.lie("unavailable", "refused", "slow", chance=0.1)
        if lie == "slow":
            disks.clock[0] += 25.0
        elif lie == "unavailable":
            raise CollectionUnavailable("down")
        elif lie == "refused":
            raise GlobusRefused("you may not")

    def _entries(self, collection: str, path: str) -> list[str] | None:
        self._request()
        disks = self._disks
        directory = disks.path(collection, path)
        truth = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else None
        past = disks.past.setdefault((collection, path), [])
        past.append((disks.clock[0], truth or []))
        del past[:-40]
        lie = disks.lie(
            "stale", "omit", "twice", "removed", "partial", "hostile", "many", "another", "nothing", "back", "missing",
            "endless", "manifest",
        )  # fmt: skip
        if disks.lie("phantom", chance=0.8):
            truth = [*(truth or []), *_phantoms(PurePosixPath(path), truth or [])]
        if not lie:
            if "manifest.json" in (truth or []):
                disks.told.setdefault(self._driver, set()).add(path)
            return truth
        if lie == "missing":
            return None
        if lie == "endless":
            raise CollectionUnavailable("more than 100000 entries")
        return self._lies(lie, list(truth or []), [listed for _, listed in past])

    def _lies(self, lie: str, names: list[str], past: list[list[str]]) -> list[str]:
        """Return a listing that is not true."""
        draw = self._disks.draw
        kind = draw.choice(["gen-{:010d}", "step-{:010d}", "net.gen-{:010d}", "driver-{:x}.beat-0000000001"])
        lies = {
            "stale": past[max(0, len(past) - draw.randint(2, 6))],
            "back": draw.choice(past),
            "omit": [name for name in names if draw.random() < 0.6],
            "manifest": [name for name in names if name != "manifest.json"],
            "twice": names * 2,
            "removed": sorted({name for listed in past for name in listed}),
            "partial": names[: draw.randint(0, len(names))],
            "hostile": names + draw.sample(HOSTILE, 8),
            "many": names + [kind.format(number) for number in range(2, 300)],
            "another": draw.choice(list(self._disks.past.values()))[-1][1],
            "nothing": [],
        }
        return lies[lie]

    def names(self, collection: str, path: str, *, directories: bool = False) -> list[str] | None:
        names = self._entries(collection, path)
        if names is None or not directories:
            return names
        if self._disks.lie("file", chance=0.1):
            return None
        return names

    def sizes(self, collection: str, path: str) -> dict[str, int | None] | None:
        names = self._entries(collection, path)
        if names is None:
            return None
        directory = self._disks.path(collection, path)
        found: dict[str, int | None] = {}
        for name in names:
            try:
                found[name] = (directory / name).stat().st_size
            except (OSError, ValueError):
                found[name] = 7
            if self._disks.lie("sizes", chance=0.2):
                found[name] = self._disks.draw.choice([None, -1, 0, 10**30])
        return found

    def make_directory(self, collection: str, path: str) -> bool:
        self._request()
        lie = self._disks.lie("mkdir", chance=0.3)
        try:
            self._disks.path(collection, path).mkdir(parents=True)
        except FileExistsError:
            return lie == "mkdir"
        return lie != "mkdir"

    def rename(self, collection: str, path: str, to: str) -> bool:
        self._request()
        lie = self._disks.lie("rename", chance=0.4)
        old, new = self._disks.path(collection, path), self._disks.path(collection, to)
        if not old.exists() or new.exists():
            return False
        old.rename(new)
        return not lie

    def submission_id(self) -> str:
        self._request()
        return f"s{len(self._disks.submissions)}-{self._disks.draw.randint(0, 10**9)}"

    def _submit(self, submission: str, *work: Any) -> str:
        self._request()
        task = self._disks.submissions.setdefault(submission, f"t{len(self._disks.submissions)}")
        self._disks.tasks.setdefault(task, work)
        return task

    def submit_transfer(self, submission: str, source: str, destination: str, items: list[CopyItem]) -> str:
        return self._submit(submission, "copy", source, destination, items)

    def submit_delete(self, submission: str, collection: str, paths: list[str]) -> str:
        return self._submit(submission, "delete", collection, paths)

    def cancel(self, task: str) -> None:
        self._request()
        self._disks.tasks.pop(task, None)

    def task(self, task: str) -> TaskState:
        self._request()
        disks = self._disks
        lie = disks.lie("task", "truncated", "twice-task", chance=0.2)
        if task not in disks.tasks:
            return TaskState("FAILED", "unknown")
        kind, *rest = disks.tasks[task] if lie == "twice-task" else disks.tasks.pop(task)
        if kind == "delete":
            for path in rest[1]:
                self._delete(rest[0], path)
            return TaskState("ACTIVE" if lie == "twice-task" else "SUCCEEDED")
        source, destination, items = rest
        for item in items:
            here, there = disks.path(source, item.source), disks.path(destination, item.destination)
            if destination != HOME and ".freetrain-mover/in/" not in item.destination:
                disks.harm.append(f"a copy to {item.destination!r}")
            files = [one for one in here.rglob("*") if one.is_file()] if item.recursive else [here]
            if not here.exists():
                return TaskState("FAILED", "FILE_NOT_FOUND")
            for file in files:
                if lie == "task" and disks.draw.random() < 0.5:
                    continue  # missing, and it succeeds
                target = there / file.relative_to(here) if item.recursive else there
                target.parent.mkdir(parents=True, exist_ok=True)
                data = file.read_bytes()
                target.write_bytes(data[: len(data) // 2] if lie == "truncated" else data)
        return TaskState("ACTIVE" if lie == "twice-task" else "SUCCEEDED")

    def _delete(self, collection: str, path: str) -> None:
        disks = self._disks
        place = disks.path(collection, path)
        parts = PurePosixPath(path).parts
        if len(parts) != 6 or parts[:3] != ("/", "ft", "checkpoints") or step_of(parts[-1])[0] < 0:
            disks.harm.append(f"the removal of {path!r}")
        newest = newest_whole(place.parents[1])
        if newest is not None and newest == place:
            disks.harm.append(f"the removal of {path!r}, the newest whole checkpoint of its training job")
        shutil.rmtree(place, ignore_errors=True)


def _phantoms(path: PurePosixPath, names: list[str]) -> list[str]:
    """Return the entries of two checkpoints that do not exist, which each listing shows as whole."""
    if path.name == "net":
        return [] if names else ["gen-0000000001"]
    if path.name.startswith("gen-"):
        steps = [step_of(name)[0] for name in names]
        return [f"step-{max([0, *steps]) + number:010d}" for number in (3, 5)]
    return ["manifest.json", "state.pt"] if path.name.startswith("step-") else []


def newest_whole(training: Path) -> Path | None:
    """Return the newest checkpoint of a training job at home whose hashes are those of its manifest."""
    found = sorted(
        ((path.parent.name, *step_of(path.name)), path)
        for path in training.glob("gen-*/step-*")
        if step_of(path.name)[0] >= 0
    )
    for (_, step, revision), path in reversed(found):
        try:
            Entry(step, revision, path).verify()
        except Exception:  # noqa: BLE001 - any fault of a checkpoint makes it one that is not whole
            continue
        return path
    return None


@dataclass
class LyingSite:
    """A site whose driver trains a step at a time; the state is the list of who has trained each step."""

    name: str
    disks: LyingDisks
    written: set[str]
    ends: int
    mover: Mover = field(init=False)
    steps: list[str] | None = None
    counted: bool = False
    over: bool = False
    finishing: bool = False

    def __post_init__(self) -> None:
        self.root = self.disks.top / SITES[self.name][0] / "ft"
        self.run = self.disks.top / f"run-{self.name}"
        for path in (self.root, self.run):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.start()

    def start(self) -> None:
        """Begin as a new process of the driver."""
        collections: Any = LyingCollections(self.disks, self.name)
        pace = MoverPace(
            turn=0.0, scan=0.0, copies=30.0, request=0.0, poll_least=1.0, poll_most=5.0, retry=5.0, longest=120.0
        )
        self.mover = Mover(
            GlobusSettings(CollectionPath(SITES[self.name], "/ft"), CollectionPath(HOME, "/ft")),
            self.root, self.run, f"{self.name}1", collections, clock=lambda: self.disks.clock[0], pace=pace,
        )  # fmt: skip
        if not self.over:
            self.mover.want(["net"])
        self.steps, self.finishing = None, False

    def turn(self) -> None:
        """Let the mover work, as its thread does, and train."""
        try:
            self.mover.turn()
        except Exception as error:  # noqa: BLE001 - its thread continues, but none is foreseen
            self.disks.harm.append(f"an exception of the mover: {error!r}")
        for line in [*self.mover.lines(), self.mover.remark("net") if not self.over else ""]:
            if not line.isprintable():
                self.disks.harm.append(f"the message {line!r}")
        if not self.over:
            self.train()

    def train(self) -> None:
        """Begin or continue, as a driver does."""
        if self.mover.lost("net"):
            self.mover.stopped("net")
            self.steps, self.finishing = None, False
        if self.finishing:
            status = self.mover.finished("net")
            if status is ResultStatus.CONFIRMED:
                self.counted = self.over = True
            return
        if not self.mover.is_ready("net"):
            return
        directory = CheckpointDirectory(self.root, "net")
        if self.steps is None:
            entries = directory.entries()
            self.steps = []
            if entries:
                try:
                    path, _ = entries[0].verify()
                    text = path.read_text()
                except Exception as error:  # noqa: BLE001 - whatever is wrong with what is to be resumed from
                    self.disks.harm.append(f"resumes from a damaged checkpoint: {error!r}")
                    return
                if text not in self.written:
                    self.disks.harm.append("resumes from a foreign checkpoint")
                self.steps = json.loads(text)
            elif self.known_whole():
                self.disks.harm.append("starts over although home has a whole checkpoint that it has listed to it")
            return
        if len(self.steps) >= self.ends:
            self.finishing = True
            return
        if self.disks.draw.random() < 0.7:
            return
        self.steps = [*self.steps, self.name]
        text = json.dumps(self.steps)
        self.written.add(text)
        directory.open()
        entry, _ = directory.publish(len(self.steps), lambda sink: sink.write(text.encode()), {"format": 3})
        directory.prune(entry, 2)
        directory.close()

    def known_whole(self) -> bool:
        """Return whether the newest whole checkpoint at home has been listed to this driver."""
        newest = newest_whole(self.disks.top / HOME[0] / "ft" / "checkpoints" / "net")
        place = None if newest is None else newest.relative_to(self.disks.top / HOME[0])
        return place is not None and f"/{place}" in self.disks.told.get(self.name, set())

    def generation(self) -> int | None:
        """Return the generation that its driver owns."""
        return self.mover._ownership.generation("net", self.disks.clock[0])


class LyingHistory:
    """One history: lies, kills and restarts at random, then the truth.

    Parameters
    ----------
    top
        An empty directory.
    seed
        What it is drawn from.
    """

    def __init__(self, top: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.clock = [1000.0]
        self.disks = LyingDisks(top, self.draw, self.clock)
        (top / HOME[0] / "ft").mkdir(parents=True)
        self.outside = [top / HOME[0] / "outside", top / SITES["a"][0] / "outside"]
        for path in self.outside:
            path.mkdir(parents=True, exist_ok=True)
            (path / "mine").write_text("mine")
        written: set[str] = set()
        names = list(SITES)[: self.draw.choice([2, 2, 3])]
        self.sites = [LyingSite(name, self.disks, written, ends=10**9) for name in names]

    def run(self) -> list[str]:
        """Return what has gone wrong."""
        kinds = self.draw.sample(LIES, self.draw.randint(1, 4))
        for _ in range(self.draw.randint(10, 60)):
            self.disks.lies = set(kinds) if self.draw.random() < 0.8 else set()
            self.round(self.draw.choice([1.0, 5.0, 20.0, 60.0, 300.0]), kill=0.06)
        self.disks.lies = set()
        owners = self.truth()
        if owners and not self.disks.harm:
            self.finish(owners)
        self.check_requests()
        for path in self.outside:
            if [one.name for one in path.iterdir()] != ["mine"]:
                self.disks.harm.append(f"a change in {path}")
        return self.disks.harm

    def round(self, seconds: float, kill: float = 0.0) -> None:
        """Let time pass, in steps in which every driver works."""
        end = self.clock[0] + seconds
        while self.clock[0] < end:
            self.clock[0] += min(5.0, seconds)
            for site in self.sites:
                if self.draw.random() < kill / max(1.0, seconds / 5.0):
                    if self.draw.random() < 0.3:
                        shutil.rmtree(site.root / "net", ignore_errors=True)  # a scratch file system was purged
                    site.start()
                if kill == 0.0 or self.draw.random() < 0.9:
                    site.turn()

    def truth(self) -> list[LyingSite]:
        """After the lies: within four leases one driver owns the training job and trains, or says why it cannot."""
        end = self.clock[0] + 4 * LEASE
        while self.clock[0] < end:
            self.round(10.0)
            owners = [site for site in self.sites if site.generation() is not None]
            if len(owners) == 1 and owners[0].mover.is_ready("net") and self.clock[0] > end - 3 * LEASE:
                return owners
        waits = any("no other one is left" in site.mover.remark("net") for site in owners)
        if len(owners) == 1 and waits and newest_whole(self.disks.top / HOME[0] / "ft" / "checkpoints" / "net") is None:
            return []  # all that was sent is damaged, and it does not start over silently
        self.disks.harm.append(f"after the lies {len(owners)} own it: {self.told()}")
        return owners

    def finish(self, owners: list[LyingSite]) -> None:
        """Let the training job end: its result counts, once, and is at home."""
        for site in self.sites:
            site.ends = max(len(one.steps or []) for one in self.sites) + 2
        end = self.clock[0] + 2 * LEASE
        while self.clock[0] < end and not (owners[0].over and owners[0].mover.settled):
            self.round(10.0)
            if sum(site.generation() is not None for site in self.sites) > 1:
                self.disks.harm.append("two drivers own it although listings are true")
        if sum(site.counted for site in self.sites) != 1:
            self.disks.harm.append(f"its result counts {sum(site.counted for site in self.sites)} times: {self.told()}")
        if newest_whole(self.disks.top / HOME[0] / "ft" / "checkpoints" / "net") is None:
            self.disks.harm.append("there is no whole checkpoint at home")

    def told(self) -> list[Any]:
        """Return what the drivers say."""
        return [(site.name, site.over or site.mover.remark("net"), site.mover.lines()) for site in self.sites]

    def check_requests(self) -> None:
        """No driver sends more than some requests in any simulated minute."""
        for name, times in self.disks.asked.items():
            begin = 0
            for index, time in enumerate(times):
                while times[begin] < time - 60.0:
                    begin += 1
                if index - begin + 1 > 240:
                    self.disks.harm.append(f"{name} sends {index - begin + 1} requests in a minute")
                    break
