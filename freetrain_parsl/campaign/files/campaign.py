"""A campaign: the training jobs of one run, read from a YAML file and validated before anything is submitted."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.files.apps import check_arguments, load_app
from freetrain_parsl.campaign.files.entries import CampaignFile, TrainingNames
from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.strict_yaml import read_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from freetrain_parsl.app import TrainingApp
    from freetrain_parsl.campaign.files.entries import TrainingsEntry

__all__ = ["Campaign", "CampaignTraining"]


@dataclass(frozen=True)
class CampaignTraining:
    """One training job of a campaign.

    Parameters
    ----------
    name
        Unique in the campaign; also names its checkpoints.
    app
        The app, with the campaign's options.
    arguments
        Its arguments.
    kinds_at
        File and line of its kinds of nodes, or of the training job.
    size_at
        File and line of its minimum size, or of the training job.
    """

    name: str
    app: TrainingApp
    arguments: Mapping[str, Any]
    kinds_at: str = ""
    size_at: str = ""


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
        parsed = CampaignFile.parse(text, file, directory, variables)
        apps: dict[str, tuple[TrainingApp, Path]] = {}
        names = TrainingNames()
        trainings: list[CampaignTraining] = []
        for entry in parsed.entries:
            if entry.reference not in apps:
                apps[entry.reference] = entry.section.checked(load_app, entry.reference, directory, key="app")
            for training in _trainings_of(entry, apps[entry.reference][0], parsed.tracker):
                names.add(entry, training.name)
                trainings.append(training)
        return cls(
            name=parsed.name,
            file=file,
            text=text,
            variables=dict(variables.used),
            trainings=tuple(trainings),
            import_paths=tuple(dict.fromkeys(path for _, path in apps.values())),
        )


def _trainings_of(entry: TrainingsEntry, app: TrainingApp, tracker: Any) -> Iterator[CampaignTraining]:
    """Return the training jobs of an item of the list."""
    section, options = entry.section, dict(entry.options)
    if tracker is not None and app.request("training").trackers is None:
        options.setdefault("tracker", tracker)
    kinds_at = section.where("node_kinds" if "node_kinds" in options else "scaling")
    size_at = section.where(
        next((word for word in ("accelerators", "min_accelerators") if word in options), "min_nodes")
    )
    first_seed = options.get("seed", app.request("seed").options.seed)
    for point in entry.points():
        section.checked(check_arguments, app, point.arguments, key=entry.arguments_key)
        own = {**options, "seed": first_seed + point.repeat} if entry.repeats > 1 else options
        configured = section.checked(app.options, name=point.name, **own)
        yield CampaignTraining(point.name, configured, point.arguments, kinds_at, size_at)
