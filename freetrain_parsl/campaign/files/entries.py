"""The text of a campaign file: its training jobs, read and checked without their apps."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.app_options import AppOptions
from freetrain_parsl.campaign.files.yaml_file import Section, user_path
from freetrain_parsl.campaign.site.site import read_costs
from freetrain_parsl.errors import InvalidApp, InvalidSettings
from freetrain_parsl.executor.jobs.request import fusion_of
from freetrain_parsl.executor.values.tracker import parse_trackers
from freetrain_parsl.planning.curves.scaling import LEARN
from freetrain_parsl.protocol.options import snapshot_steps
from freetrain_parsl.sweep import NameTemplate, is_template

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from freetrain_parsl.campaign.files.yaml_file import Variables

__all__ = ["CampaignFile", "TrainingNames", "TrainingPoint", "TrainingsEntry"]

_MOST_TRAININGS = 10_000  # more is probably an error in a grid


@dataclass(frozen=True)
class TrainingPoint:
    """One training job of an item of the list; the first of its repeats has number 0."""

    name: str
    arguments: Mapping[str, Any]
    repeat: int


@dataclass(frozen=True)
class TrainingsEntry:
    """An item of the list of training jobs: one training job, or all of its grid and repeats.

    Parameters
    ----------
    section
        Its place in the file.
    reference
        Its app.
    options
        Options of the app that it sets.
    arguments, grid, repeats
        Its arguments, those with several values, and how often each combination is trained.
    template
        Names its training jobs.
    numbered
        Whether the number of the repeat is appended to the name.
    """

    section: Section
    reference: str
    options: Mapping[str, Any]
    arguments: Mapping[str, Any]
    grid: Mapping[str, list[Any]]
    repeats: int
    template: NameTemplate
    numbered: bool

    @classmethod
    def read(cls, section: Section, directory: Path) -> TrainingsEntry:
        """Read an item; paths are relative to `directory`.

        Raises
        ------
        InvalidInput
            A key is unknown, or a value is invalid; the message gives file and line.
        """
        reference = section.required("app", "path.py:function")
        section.checked(user_path, reference, key="app")  # before it gives the training jobs their names
        options = _read_options(section, directory)
        arguments = section.section("arguments").values()
        grid = _read_grid(section, arguments)
        repeats = section.count("repeat") or 1
        count = math.prod(map(len, grid.values())) * repeats
        given = section.text("name") or _default_name(reference, grid, repeats)
        template = section.checked(NameTemplate, given, (*grid, "repeat"), key="name")
        section.done()
        if count > _MOST_TRAININGS:
            raise section.refusal(f"this makes more than {_MOST_TRAININGS} training jobs", "grid" if grid else "repeat")
        numbered = repeats > 1 and not grid and not is_template(given)
        return cls(section, reference, options, arguments, grid, repeats, template, numbered)

    @property
    def arguments_key(self) -> str:
        """The key that messages on arguments name."""
        return "arguments" if self.section.has("arguments") else "grid"

    def points(self) -> Iterator[TrainingPoint]:
        """Return its training jobs, in order."""
        for values in itertools.product(*self.grid.values()):
            point = dict(zip(self.grid, values, strict=True))
            for repeat in range(self.repeats):
                name = self.section.checked(self.template.fill, {**point, "repeat": repeat + 1}, key="name")
                if self.numbered:
                    name = f"{name}-{repeat + 1}"
                yield TrainingPoint(name, {**self.arguments, **point}, repeat)


@dataclass(frozen=True)
class CampaignFile:
    """A campaign file without its apps; `tracker` is for the training jobs that set none."""

    name: str
    tracker: Any
    entries: tuple[TrainingsEntry, ...]

    @classmethod
    def parse(cls, text: str, file: str, directory: Path, variables: Variables) -> CampaignFile:
        """Parse the text of a campaign file from `directory`; `file` is its name in messages.

        Raises
        ------
        InvalidInput
            It is not YAML, a key is unknown, or a value is invalid; the message gives file and line.
        """
        top = Section.parse(text, file, variables)
        name = top.text("name") or Path(file).stem
        tracker = _read_tracker(top, directory)
        sections = top.sections("trainings")
        top.done()
        if not sections:
            raise top.refusal("there are no 'trainings'; list at least one: '- app: path.py:function'")
        return cls(name, tracker, tuple(TrainingsEntry.read(section, directory) for section in sections))


class TrainingNames:
    """The names of a campaign's training jobs: each is unique, and they are not too many."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def add(self, entry: TrainingsEntry, name: str) -> None:
        """Add a name of an item.

        Raises
        ------
        InvalidInput
            Another training job has it, or there are too many.
        """
        if name in self.names:
            raise entry.section.refusal(
                f"two training jobs are named {name!r}; give a 'name' of its own to one of them", "name"
            )
        self.names[name] = None
        if len(self.names) > _MOST_TRAININGS:
            raise entry.section.refusal(f"this makes more than {_MOST_TRAININGS} training jobs")


def _read_options(section: Section, directory: Path) -> dict[str, Any]:
    """Read the options of the training app; the app's own values are the defaults."""
    options: dict[str, Any] = {
        **section.fields_of(AppOptions, positive=True, zero=("seed",)),
        "on_code_change": section.text("on_code_change"),
        "fuse": _read_fuse(section),
        "snapshot_every": _read_snapshot_every(section),
        "node_kinds": _read_node_kinds(section),
        "tracker": _read_tracker(section, directory),
        "stage": _read_stage(section, directory),
    }
    if section.has("rescale_costs"):
        options["rescale_costs"] = read_costs(section.section("rescale_costs"))
    scaling = section.value("scaling")
    if isinstance(scaling, dict) and any(isinstance(kind, str) for kind in scaling):
        options["scaling"] = {kind: _read_scaling(section, curve, directory) for kind, curve in scaling.items()}
    else:
        options["scaling"] = _read_scaling(section, scaling, directory)
    return {key: value for key, value in options.items() if value is not None}


def _read_scaling(section: Section, scaling: Any, directory: Path) -> Any:
    if isinstance(scaling, str) and scaling != LEARN:
        return directory / section.checked(user_path, scaling, key="scaling")
    if not (scaling is None or scaling == LEARN or isinstance(scaling, dict)):
        raise section.refusal(
            "must be a mapping of nodes to samples per second, a file, or 'learn', or these for each kind of node",
            "scaling",
        )
    return scaling


def _read_node_kinds(section: Section) -> list[str] | None:
    kinds = section.value("node_kinds")
    if kinds is not None and not (isinstance(kinds, list) and kinds and all(isinstance(kind, str) for kind in kinds)):
        raise section.refusal("should be a list of kinds of nodes, such as [gpu]", "node_kinds")
    return kinds


def _read_stage(section: Section, directory: Path) -> dict[str, Path] | None:
    """Return name -> file; the functions use the names."""
    names = section.value("stage")
    if names is None:
        return None
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise section.refusal("should be a list of files and directories, such as [data/train.npz]", "stage")
    return {name: (directory / section.checked(user_path, name, key="stage")).absolute() for name in names}


def _read_tracker(section: Section, directory: Path) -> Any:
    value = section.value("tracker")
    section.checked(parse_trackers, value, directory.resolve(), key="tracker")
    return value


def _read_fuse(section: Section) -> Any:
    """Reject what an app rejects, in the words of YAML."""
    value = section.value("fuse")
    try:
        fusion_of("auto" if value is None else value, None)
    except InvalidApp:
        given = "true" if value is True else repr(value)
        raise section.refusal(
            f"fuse must be auto, false or a whole number of at least 2, got {given}", "fuse"
        ) from None
    return value


def _read_snapshot_every(section: Section) -> Any:
    """Reject what an app rejects, in the words of YAML."""
    value = section.value("snapshot_every")
    try:
        snapshot_steps("auto" if value is None else value)
    except InvalidSettings:
        given = "true" if value is True else repr(value)
        raise section.refusal(
            f"snapshot_every must be auto, false or a number of steps of at least 1, got {given}", "snapshot_every"
        ) from None
    return value


def _read_grid(section: Section, arguments: Mapping[str, Any]) -> dict[str, list[Any]]:
    grid = section.section("grid").values()
    for name, values in grid.items():
        if not (isinstance(values, list) and values):
            raise section.refusal(f"{name!r} should be a list of values", "grid")
        if name in arguments:
            raise section.refusal(f"{name!r} is already an argument", "grid")
    return grid


def _default_name(reference: str, grid: Mapping[str, object], repeat: int) -> str:
    """Name training jobs after their app's file and the values in which they differ."""
    place, _, function = reference.rpartition(":")
    first = (Path(place).stem if "/" in place or place.endswith(".py") else place.rpartition(".")[2]) or function
    return "-".join([first, *(f"{name}{{{name}}}" for name in grid), *(["{repeat}"] if repeat > 1 else [])])
