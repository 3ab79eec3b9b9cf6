"""Training apps that are defined in the cells of a notebook, for a driver in another process.

They are kept in ``notebook/`` of the run directory, next to the campaign file that names them::

    campaign.yaml         the training jobs
    freetrain_cells.py    a module with the apps
    cells.pickle          the apps, with what they use of the notebook
    code.json             digests of their code and options

The driver reads the apps as they were when the run was started; the digests show whether a cell has been changed since.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from freetrain_parsl.campaign.files.yaml_file import user_path
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.planning.curves.scaling import LEARN
from freetrain_parsl.protocol.options import Code, digest_of
from freetrain_parsl.report.output import write_output
from freetrain_parsl.storage.atomic_files import replace_file
from freetrain_parsl.storage.owned_files import require_own_entries

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.app import TrainingApp

__all__ = ["CAMPAIGN_FILE", "CellCampaign", "load_apps"]

CAMPAIGN_FILE: Final = "campaign.yaml"

_MODULE = "freetrain_cells"
_PICKLE = "cells.pickle"
_CODE = "code.json"
_SOURCE = '''\
"""Training apps that were defined in a notebook, as they were when its run was started."""

from pathlib import Path

from freetrain_parsl.extensions.notebook.cells import load_apps

globals().update(load_apps(Path(__file__).parent))
'''


class _Dumper(yaml.SafeDumper):
    """Writes texts in quotes: ``1e-3`` is a number in campaign files, although PyYAML takes it for a text."""


_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


@dataclass(frozen=True)
class CellCampaign:
    """A campaign that was written in a cell: the training jobs of a campaign file, whose ``app`` may be a training app.

    Parameters
    ----------
    text
        Its campaign file.
    apps
        The apps of cells, by the names of their functions.
    """

    text: str
    apps: Mapping[str, TrainingApp]

    @classmethod
    def of(cls, trainings: Sequence[Mapping[str, Any]], name: str, directory: Path) -> CellCampaign:
        """Write the campaign file.

        Parameters
        ----------
        trainings
            As in a campaign file, with Python values.
        name
            Name of the campaign.
        directory
            Paths are relative to it.

        Raises
        ------
        InvalidInput
            A training job is not a mapping, or has a value that a file cannot have.
        """
        from freetrain_parsl.app import TrainingApp

        apps: dict[str, TrainingApp] = {}
        written = []
        for number, training in enumerate(trainings, start=1):
            if not hasattr(training, "items"):
                raise InvalidInput(
                    f"training job {number}: give a dict with the keys of a campaign file, got {training!r}"
                )
            where = f"training job {number}"
            entry = {str(key): value for key, value in training.items()}
            if "app" not in entry:
                raise InvalidInput(f"{where} has no 'app': a training app, or 'path.py:function'")
            if isinstance(entry["app"], TrainingApp):
                entry.setdefault("name", _default_name(entry))
            entry["app"] = _app_reference(entry["app"], apps, directory, where)
            if "scaling" in entry:
                entry["scaling"] = _scaling_in(entry["scaling"], directory)
            written.append({key: _plain(value, f"{where}: {key}") for key, value in entry.items()})
        document = {"name": name, "trainings": written}
        text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
        return cls(text.replace("${", "$${"), apps)  # which would be replaced by a variable

    def write(self, directory: Path) -> Path:
        """Write the files, and return the path of the campaign file.

        Raises
        ------
        InvalidApp
            An app uses an object that cannot be pickled.
        """
        from freetrain_parsl.executor.payloads.payloads import pack_training

        self.check()
        payload = pack_training(_nothing, (), dict(self.apps))
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_own_entries(directory, "give another run_dir")  # compiled modules of others would be imported instead
        write_output(directory / f"{_MODULE}.py", _SOURCE)
        replace_file(directory / _PICKLE, payload)
        self.write_code(directory)
        file = directory / CAMPAIGN_FILE
        write_output(file, self.text)
        return file

    def check(self) -> None:
        """Refuse apps that cannot be written.

        Raises
        ------
        InvalidApp
            An app uses an object that cannot be pickled.
        """
        from freetrain_parsl.executor.payloads.payloads import pack_or_refuse

        for app in self.apps.values():
            pack_or_refuse(app.func, (), {})  # it names what cannot be pickled

    def by_reference(self) -> dict[str, TrainingApp]:
        """Return the apps by their references in the campaign file."""
        return {f"{_MODULE}.py:{name}": app for name, app in self.apps.items()}

    def write_code(self, directory: Path) -> None:
        """Write the digests of the apps' code."""
        write_output(directory / _CODE, json.dumps({name: _identity(app) for name, app in self.apps.items()}))

    def changes_since(self, directory: Path) -> list[str]:
        """Return what has changed in the apps since they were written: names of functions, classes and globals.

        Raises
        ------
        InvalidInput
            The digests cannot be read.
        """
        path = directory / _CODE
        try:
            written = json.loads(path.read_text(encoding="utf-8"))
            before = {name: (Code(**entry["code"]), entry["options"]) for name, entry in written.items()}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidInput(f"{path} cannot be read: {error}; give another run_dir") from None
        changed: list[str] = []
        for name, app in self.apps.items():
            if name not in before:
                changed.append(name)
                continue
            code, options = before[name]
            now = _identity(app)
            changed += Code(**now["code"]).changes_since(code)
            if now["options"] != options:
                changed.append(f"the options of {name}")
            if now["code"]["python"] != code.python:
                changed.append(f"Python {code.python}")
        return list(dict.fromkeys(changed))


def load_apps(directory: Path) -> dict[str, TrainingApp]:
    """Return the apps of a run's cells, by name.

    Raises
    ------
    ForeignCheckpoint
        Another user owns the file, or could have changed it.
    """
    from freetrain_parsl.executor.payloads.payloads import unpack_training
    from freetrain_parsl.storage.owned_files import check_owned

    path = directory / _PICKLE
    check_owned(directory)
    check_owned(path)
    _, _, apps = unpack_training(path.read_bytes())
    return apps


def _nothing() -> None:
    """Stand for the function of a call, of which only the arguments are wanted."""


def _identity(app: TrainingApp) -> dict[str, Any]:
    from freetrain_parsl.training.checkpoints.code.code_identity import code_of

    request = app.request("training")
    return {"code": asdict(code_of(app.func)), "options": digest_of([repr(request)])}


def _app_reference(app: Any, apps: dict[str, TrainingApp], directory: Path, where: str) -> str:
    """Return how the campaign file names an app."""
    from freetrain_parsl.app import TrainingApp

    if isinstance(app, str):
        place, colon, function = app.rpartition(":")
        is_path = place.endswith(".py") or "/" in place
        return f"{directory / user_path(place)}{colon}{function}" if is_path else app
    if not isinstance(app, TrainingApp):
        hint = ": decorate it with @training_app" if callable(app) else ""
        raise InvalidInput(f"{where}: 'app' is {app!r}, not a training app{hint}")
    name = app.func.__name__
    if not name.isidentifier():
        raise InvalidInput(f"{where}: 'app' is a {name}; give its function a name with def")
    if apps.setdefault(name, app) is not app:
        raise InvalidInput(f"{where}: another training app is named {name}(), too; rename one of the functions")
    return f"{_MODULE}.py:{name}"


def _scaling_in(scaling: Any, directory: Path) -> Any:
    """Return a scaling curve, or those of each kind of node, with the paths of files in this directory."""
    if isinstance(scaling, dict):
        return {key: _scaling_in(curve, directory) for key, curve in scaling.items()}
    is_file = isinstance(scaling, (str, Path)) and scaling != LEARN
    return str(directory / user_path(str(scaling))) if is_file else scaling


def _default_name(entry: Mapping[str, Any]) -> str:
    """Name training jobs after their function and the values in which they differ, as a campaign file does."""
    grid, repeat = entry.get("grid"), entry.get("repeat")
    parts = [f"{key}{{{key}}}" for key in grid] if isinstance(grid, dict) else []
    if isinstance(repeat, int) and repeat > 1:
        parts.append("{repeat}")
    return "-".join([entry["app"].func.__name__, *parts])


def _plain(value: Any, where: str) -> Any:
    """Return a value as a campaign file can have it: NumPy's numbers and arrays become Python's."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {_key(key, where): _plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_plain(item, where) for item in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise InvalidInput(
        f"{where}: {value!r} cannot be in a campaign; give numbers, texts, lists or mappings, and make the object in "
        "the training function"
    )


def _key(key: Any, where: str) -> Any:
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    raise InvalidInput(f"{where}: the key {key!r} is neither a text nor a whole number")
