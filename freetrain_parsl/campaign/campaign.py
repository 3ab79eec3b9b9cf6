"""A campaign: the trainings of one run, read from a YAML file and validated before anything is submitted."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.apps import LoadedApp, check_arguments, load_app
from freetrain_parsl.campaign.site import read_costs
from freetrain_parsl.campaign.yaml_file import Section, Variables, user_path
from freetrain_parsl.errors import InvalidTrainer
from freetrain_parsl.executor.trainings import fusion_of
from freetrain_parsl.planning.curves.scaling import LEARN
from freetrain_parsl.strict_yaml import read_text
from freetrain_parsl.sweeps.names import NameTemplate, is_template
from freetrain_parsl.trackers.settings import parse_trackers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from freetrain_parsl.app import TrainingApp
    from freetrain_parsl.executor.trainings import Fuse

__all__ = ["Campaign", "CampaignTraining"]

_MOST_TRAININGS = 10_000  # more is probably an error in a grid
_MOST_NODES = 1_000_000  # more than any cluster has


@dataclass(frozen=True)
class CampaignTraining:
    """One training of a campaign.

    Parameters
    ----------
    name
        Unique in the campaign; also names its checkpoints.
    app
        The app, with the campaign's options.
    arguments
        Its arguments.
    kinds_at
        File and line of its kinds of nodes, or of the training.
    min_nodes_at
        File and line of its minimum number of nodes, or of the training.
    """

    name: str
    app: TrainingApp
    arguments: Mapping[str, Any]
    kinds_at: str = ""
    min_nodes_at: str = ""


@dataclass(frozen=True)
class Campaign:
    """A validated campaign file, with its apps imported.

    Parameters
    ----------
    name
        Display name.
    file
        Path as given.
    text
        Original text of the file.
    variables
        Values of ``${NAME}`` in it.
    trainings
        In file order.
    import_paths
        Directories from which the nodes import the apps' modules.
    """

    name: str
    file: str
    text: str = field(repr=False)
    variables: Mapping[str, str]
    trainings: tuple[CampaignTraining, ...]
    import_paths: tuple[Path, ...]

    @classmethod
    def load(cls, path: str | Path, variables: Variables | None = None) -> Campaign:
        """Read a campaign file.

        Parameters
        ----------
        path
            The file; paths in it are relative to its directory.
        variables
            Values for ``${NAME}``; default: the environment.

        Raises
        ------
        InvalidInput
            It cannot be read, an app cannot be imported, or a value is invalid; the message gives file and line.
        """
        file = Path(path)
        return cls.parse(read_text(file, "campaign file"), str(file), file.absolute().parent, variables or Variables())

    @classmethod
    def parse(cls, text: str, file: str, directory: Path, variables: Variables) -> Campaign:
        """Parse the text of a campaign file from `directory`; `file` is its name in messages."""
        top = Section.parse(text, file, variables)
        name = top.text("name") or Path(file).stem
        tracker = _read_tracker(top, directory)
        sections = top.sections("trainings")
        top.done()
        if not sections:
            raise top.refusal("there are no 'trainings'; list at least one: '- app: path.py:function'")
        apps: dict[str, LoadedApp] = {}
        trainings: dict[str, CampaignTraining] = {}
        for section in sections:
            for training in _read_trainings(section, directory, apps, tracker):
                if training.name in trainings:
                    raise section.refusal(
                        f"two trainings are named {training.name!r}; give a 'name' of its own to one of them", "name"
                    )
                trainings[training.name] = training
                if len(trainings) > _MOST_TRAININGS:
                    raise section.refusal(f"this makes more than {_MOST_TRAININGS} trainings")
        return cls(
            name=name,
            file=file,
            text=text,
            variables=dict(variables.used),
            trainings=tuple(trainings.values()),
            import_paths=tuple(dict.fromkeys(app.import_path for app in apps.values())),
        )


def _read_trainings(
    section: Section, directory: Path, apps: dict[str, LoadedApp], tracker: Any
) -> Iterator[CampaignTraining]:
    """Read one list item: a training, or all trainings of its grid and repeats."""
    reference = section.required("app", "path.py:function")
    if reference not in apps:
        apps[reference] = section.checked(load_app, reference, directory, key="app")
    app = apps[reference].app
    options = _read_options(section, directory)
    if tracker is not None and app.request("training").trackers is None:
        options.setdefault("tracker", tracker)
    arguments = section.section("arguments").values()
    grid = _read_grid(section, arguments)
    repeat = section.count("repeat") or 1
    count = math.prod(map(len, grid.values())) * repeat
    given = section.text("name") or _default_name(reference, grid, repeat)
    template = section.checked(NameTemplate, given, (*grid, "repeat"), key="name")
    numbered = repeat > 1 and not grid and not is_template(given)
    section.done()
    if count > _MOST_TRAININGS:
        raise section.refusal(f"this makes more than {_MOST_TRAININGS} trainings", "grid" if grid else "repeat")
    kinds_at = section.where("node_kinds" if "node_kinds" in options else "scaling")
    min_nodes_at = section.where("min_nodes")
    first_seed = options.get("seed", app.request("seed").options.seed)
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        called = {**arguments, **point}
        section.checked(check_arguments, app, called, key="arguments" if section.has("arguments") else "grid")
        for number in range(repeat):
            name = section.checked(template.fill, {**point, "repeat": number + 1}, key="name")
            if numbered:
                name = f"{name}-{number + 1}"
            own = {**options, "seed": first_seed + number} if repeat > 1 else options
            yield CampaignTraining(name, section.checked(app.options, name=name, **own), called, kinds_at, min_nodes_at)


def _read_options(section: Section, directory: Path) -> dict[str, Any]:
    """Read the options of the training app; the app's own values are the defaults."""
    options: dict[str, Any] = {
        "min_nodes": section.count("min_nodes", most=_MOST_NODES),
        "max_nodes": section.count("max_nodes", most=_MOST_NODES),
        "priority": section.number("priority"),
        "deadline": section.time_or_duration("deadline"),
        "samples": section.count("samples"),
        "epochs": section.count("epochs"),
        "seed": section.count("seed", least=0),
        "checkpoint_interval": section.duration("checkpoint_interval", positive=True),
        "on_code_change": section.text("on_code_change"),
        "fuse": _read_fuse(section),
        "node_kinds": _read_node_kinds(section),
        "tracker": _read_tracker(section, directory),
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


def _read_tracker(section: Section, directory: Path) -> Any:
    value = section.value("tracker")
    section.checked(parse_trackers, value, directory.resolve(), key="tracker")
    return value


def _read_fuse(section: Section) -> Fuse | None:
    value = section.value("fuse")
    section.checked(_check_fuse, "auto" if value is None else value, key="fuse")
    fuse: Fuse | None = value
    return fuse


def _check_fuse(value: Any) -> None:
    """Reject what an app rejects, in the words of YAML."""
    try:
        fusion_of(value, None)
    except InvalidTrainer:
        given = "true" if value is True else repr(value)
        raise InvalidTrainer(f"fuse must be auto, false or a whole number of at least 2, got {given}") from None


def _read_grid(section: Section, arguments: Mapping[str, Any]) -> dict[str, list[Any]]:
    grid = section.section("grid").values()
    for name, values in grid.items():
        if not (isinstance(values, list) and values):
            raise section.refusal(f"{name!r} should be a list of values", "grid")
        if name in arguments:
            raise section.refusal(f"{name!r} is already an argument", "grid")
    return grid


def _default_name(reference: str, grid: Mapping[str, object], repeat: int) -> str:
    """Name trainings after their app's file and the values in which they differ."""
    place, _, function = reference.rpartition(":")
    first = (Path(place).stem if "/" in place or place.endswith(".py") else place.rpartition(".")[2]) or function
    return "-".join([first, *(f"{name}{{{name}}}" for name in grid), *(["{repeat}"] if repeat > 1 else [])])
