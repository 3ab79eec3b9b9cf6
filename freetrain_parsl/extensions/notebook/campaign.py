"""A campaign from a cell: it is started in the background, and found again by the same cell."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.detached import driver_process, local_status, run_detached
from freetrain_parsl.campaign.directories import BEFORE_THE_RUN, CELLS
from freetrain_parsl.campaign.files.app_source import check_campaign
from freetrain_parsl.campaign.files.entries import CampaignFile
from freetrain_parsl.campaign.files.yaml_file import Variables, user_path
from freetrain_parsl.campaign.site.site import Site, find_own_site, find_site_file
from freetrain_parsl.campaign.stored_run import DATABASE, StoredRun
from freetrain_parsl.errors import InvalidApp, InvalidInput
from freetrain_parsl.executor.run_directory import check_new_run_directory, check_run_directory
from freetrain_parsl.extensions.notebook.cells import CAMPAIGN_FILE, CellCampaign
from freetrain_parsl.extensions.notebook.control import controller_of, environment_of_user, take_control
from freetrain_parsl.extensions.notebook.run import StartedRun
from freetrain_parsl.extensions.notebook.shown import ShownCampaign
from freetrain_parsl.extensions.notebook.snapshot import short_path
from freetrain_parsl.protocol.options import check_on_code_change
from freetrain_parsl.screen import say
from freetrain_parsl.storage.owned_files import require_own_directory
from freetrain_parsl.strict_yaml import read_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.protocol.options import OnCodeChange

__all__ = ["NotebookCampaign"]

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_SHOWN = 5  # changed parts in a message
_STARTING = threading.Lock()  # a second thread that starts the same campaign attaches to it


class NotebookCampaign:
    """A campaign that a notebook starts, or attaches to if it has been started already.

    Parameters
    ----------
    campaign
        A campaign file; or its ``trainings`` as a list of dicts, whose ``app`` may be a training app of this notebook.
    config
        A site file, or the name of a shipped one. Default: as of ``freetrain run``, the ``site.yaml`` of the current
        directory if it is yours, else an embedded cluster.
    settings
        Values of ``${NAME}`` in the files.
    name
        Name of the campaign, if it is not a file.
    run_dir
        Run directory; default: ``freetrain-run-NAME`` in the current directory, where the same cell finds it again.

    Raises
    ------
    InvalidInput
        A training job cannot be written to a campaign file.

    Examples
    --------
    >>> run = Campaign("sweep.yaml", config="perlmutter").start()  # doctest: +SKIP
    >>> run = Campaign([{"app": train, "grid": {"lr": [0.1, 0.01]}}], name="sweep").start()  # doctest: +SKIP
    """

    def __init__(
        self,
        campaign: str | Path | Sequence[Mapping[str, Any]],
        *,
        config: str | Path | None = None,
        settings: Mapping[str, str] | None = None,
        name: str | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        self._here = Path.cwd()
        self._config = None if config is None else str(config)
        self._settings = _texts({} if settings is None else settings)
        self._cells: CellCampaign | None = None
        self._file: Path | None = None
        if isinstance(campaign, str | Path):
            if name is not None:
                raise InvalidInput("name is for campaigns without a file; that of a file is in it")
            self._file = self._here / user_path(str(campaign))
            name = self._file.stem
        else:
            if not isinstance(campaign, (list, tuple)):
                raise InvalidInput(f"give a campaign file, or a list of training jobs as dicts, got {campaign!r}"[:300])
            name = name or "notebook"
            self._cells = CellCampaign.of(campaign, name, self._here)
        self._run_dir = self._here / user_path(str(run_dir or f"freetrain-run-{_NOT_IN_NAMES.sub('-', name)}"))

    def start(self, *, on_code_change: OnCodeChange | None = None) -> StartedRun:
        """Start the campaign's driver in the background and show the run; attach to it if it exists already.

        It checks the files and the arguments of the functions, and returns. The driver imports the functions and asks
        the batch system; what it refuses is shown, and raised by ``results``.

        Parameters
        ----------
        on_code_change
            What to do if a training function of this notebook has changed since the run was started: ``"resume"`` from
            the checkpoints with the new code, or ``"restart"``. Default: refuse.

        Returns
        -------
        StartedRun
            The run, which does not depend on this notebook.

        Raises
        ------
        InvalidInput
            The campaign or the site is invalid, or the run directory belongs to something else; in one line.
        """
        if on_code_change is not None:
            check_on_code_change(on_code_change)
        self._refuse_directory_of_others()
        if not (self._run_dir / DATABASE).exists():
            with _STARTING:
                run = self._begin()
        else:
            self._refuse_another_campaign()
            changed = [] if self._cells is None else self._cells.changes_since(self._run_dir / CELLS)
            run = self._attach()
            if changed:
                self._take_new_code(run, _some(changed), on_code_change)
                return run
            say(f"attached to {short_path(self._run_dir)}: {_what_next(run.state)}")
        if not run.controls:
            say(f"read-only: another notebook ({controller_of(self._run_dir)}) controls this run")
        run.show()
        return run

    def attach(self) -> StartedRun:
        """Find the run without starting anything.

        Raises
        ------
        InvalidInput
            It has not been started.
        """
        run = self._attach()
        run.show()
        return run

    def __repr__(self) -> str:
        return f"<campaign {self._file or 'of this notebook'}, run directory {self._run_dir}>"

    def _attach(self, name: str = "", trainings: Sequence[str] = ()) -> StartedRun:
        source = ShownCampaign(self._run_dir, name=name, trainings=trainings)
        return StartedRun(source, controls=take_control(self._run_dir))

    def _begin(self) -> StartedRun:
        """Check the campaign here, and start the driver, which checks the rest and creates the run."""
        file = self._run_dir / CELLS / CAMPAIGN_FILE if self._cells is not None else self._file
        assert file is not None, "a campaign is a file, or of cells"
        command = self._command(file)
        process = driver_process(self._run_dir)
        if process is not None and local_status(self._run_dir, None).state == "starting":
            if list(process.command) != command or not self._cells_are_those_of_the_run():
                raise InvalidInput(
                    f"{self._run_dir} is starting another campaign; give another run_dir, or look at that one: "
                    f"watch({str(self._run_dir)!r})"
                )
            say(f"attached to {short_path(self._run_dir)}: it is starting")
            return self._attach()
        name, trainings, remark = self._check(file)
        self._make_directory()
        if not take_control(self._run_dir):
            raise InvalidInput(
                f"another notebook ({controller_of(self._run_dir)}) is starting {self._run_dir}; run the cell again"
            )
        if self._cells is not None:
            self._cells.write(self._run_dir / CELLS)
        run_detached(self._run_dir, command, self._here, environment_of_user(os.environ))
        if remark:
            say(remark)
        say(f"started {short_path(self._run_dir)}")
        return self._attach(name, trainings)

    def _cells_are_those_of_the_run(self) -> bool:
        """Return whether the driver that starts has this campaign: the file of cells has the same name in each run."""
        if self._cells is None:
            return True
        written = self._run_dir / CELLS
        return self._cells.text == read_text(written / CAMPAIGN_FILE, "campaign file") and not (
            self._cells.changes_since(written)
        )

    def _check(self, file: Path) -> tuple[str, tuple[str, ...], str]:
        """Refuse what shows at once, before anything is written.

        Returns the names of campaign and training jobs, and what the user should know of the site.
        """
        check_run_directory(self._run_dir)
        variables = Variables(self._settings)
        remark = ""
        if self._config is None:
            remark = find_own_site(variables, self._here, option="config").remark
        else:
            Site.load(self._site(self._config), variables)
        if self._cells is None:
            checked = check_campaign(self._file_text(), str(file), file.parent, variables)
        else:
            self._cells.check()
            checked = check_campaign(self._cells.text, str(file), file.parent, variables, self._cells.by_reference())
        variables.refuse_unused()
        return *checked, remark

    def _refuse_directory_of_others(self) -> None:
        """Refuse a run directory whose name was taken by somebody else, before anything in it is opened."""
        try:
            require_own_directory(self._run_dir, "give another run_dir")
        except FileNotFoundError:
            return
        except OSError as error:
            raise InvalidInput(f"run_dir {self._run_dir}: {error.strerror}; choose another directory") from None

    def _make_directory(self) -> None:
        try:
            made = not self._run_dir.exists()
            self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_new_run_directory(self._run_dir, made=made)
            if any(path.name not in BEFORE_THE_RUN for path in self._run_dir.iterdir()):
                raise InvalidInput(f"{self._run_dir} is not empty, and not a run; give another run_dir")
        except OSError as error:
            raise InvalidInput(f"run_dir {self._run_dir}: {error.strerror}; choose another directory") from None

    def _command(self, file: Path) -> list[str]:
        # Without config, the driver looks for site.yaml again: it must still be the caller's when it is read.
        site = [] if self._config is None else ["--config", self._config]
        command = ["run", str(file), *site, "--run-dir", str(self._run_dir)]
        for name, value in self._settings.items():
            command += ["--set", f"{name}={value}"]
        return command

    def _site(self, config: str) -> Path:
        """Return the site file, which is relative to where the notebook was when the campaign was made."""
        path = user_path(config)
        in_directory = self._here / path
        is_name = not path.suffix and len(path.parts) == 1
        return path if is_name and not in_directory.is_file() else in_directory

    def _refuse_another_campaign(self) -> None:
        store = StoredRun(self._run_dir)
        text = self._cells.text if self._cells is not None else self._file_text()
        if store.fact("campaign_text") != text:
            raise InvalidInput(
                f"{self._run_dir} is the run of another version of this campaign; give another run_dir to start this "
                f"one, or look at that one: watch({str(self._run_dir)!r})"
            )
        site = Path(store.fact("site_file"))  # without config, wherever it was started
        if self._config is not None and site != (site := find_site_file(self._site(self._config)).absolute()):
            raise InvalidInput(
                f"{self._run_dir} is a run at {store.fact('site_file')}, not at {site}; give another run_dir"
            )
        before, given = store.fact("variables"), {name.upper() for name in self._settings}
        for name, value in self._variables_in(text, site).items():
            if before.get(name, value) != value and (name.upper() in given or name not in os.environ):
                raise InvalidInput(
                    f"{self._run_dir} is a run with {name}={before[name]}, not {value}; give another run_dir, or look "
                    f"at that one: watch({str(self._run_dir)!r})"
                )

    def _variables_in(self, text: str, site: Path) -> dict[str, str]:
        """Return the values of the variables in both files; none if one of them has no value any more."""
        variables = Variables(self._settings)
        try:
            Site.load(site, variables)
            CampaignFile.parse(text, "", self._run_dir, variables)
        except InvalidInput:  # as of a site file that was removed: the run has its own copy
            pass
        return variables.used

    def _file_text(self) -> str:
        assert self._file is not None, "the caller has checked"
        return read_text(self._file, "campaign file")

    def _take_new_code(self, run: StartedRun, changed: str, on_code_change: OnCodeChange | None) -> None:
        """Replace the apps of a run that is over, and continue it with them, if that was chosen."""
        assert self._cells is not None, "the caller has checked"
        seen = run.snapshot()
        since = f"{changed} has changed since {self._run_dir} was started"
        if all(row.state in ("finished", "cancelled") for row in seen.rows):
            raise InvalidApp(
                f"{since}, and all training jobs have ended with the old code; give another run_dir to train with "
                "the new "
                "code, or look at that run with attach()"
            )
        if on_code_change in (None, "refuse"):
            raise InvalidApp(
                f"{since}, which is {seen.state} with the old code; start(on_code_change='resume') continues its "
                "checkpoints with the new code, 'restart' sets them aside, another run_dir is a new run, and attach() "
                "looks at this one"
            )
        if not seen.over:
            raise InvalidInput(f"{since}, which is {seen.state}; stop it first: Campaign(…).attach().stop()")
        run.check_control("resume")
        self._cells.write(self._run_dir / CELLS)
        how = "continues from the checkpoints" if on_code_change == "resume" else "starts over"
        say(f"{changed} has changed: what has not finished {how} with the new code")
        run.resume(on_code_change=on_code_change)


def _texts(settings: Any) -> dict[str, str]:
    """Return the values of ``${NAME}`` as texts."""
    if not (isinstance(settings, Mapping) and all(isinstance(name, str) for name in settings)):
        raise InvalidInput(f"settings are a dict with the names of variables, got {settings!r}"[:300])
    for name, value in settings.items():
        if not isinstance(value, (str, int, float, Path)):
            raise InvalidInput(f"settings: {name} must be a text or a number, got {value!r}"[:300])
    return {name: str(value) for name, value in settings.items()}


def _what_next(state: str) -> str:
    match state:
        case "starting" | "running" | "stopping":
            return f"it is {state}"
        case "finished":
            return "it has finished; to train again, give another run_dir"
        case _:
            return f"it is over ({state}); to continue it: run.resume()"


def _some(changed: Sequence[str]) -> str:
    more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    return ", ".join(changed[:_SHOWN]) + more
