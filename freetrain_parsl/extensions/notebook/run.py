"""A run as the user of a notebook holds it: it shows itself, and answers without stopping anything."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.logs import log_lines, name_width, shown_line, trainings_of
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.errors import FreeTrainError, InvalidInput
from freetrain_parsl.extensions.notebook.control import controller_of, run_command
from freetrain_parsl.extensions.notebook.live import LiveDisplay, bundle_of, in_kernel
from freetrain_parsl.extensions.notebook.pictures import curves_picture
from freetrain_parsl.extensions.notebook.values import TextLines, results_table
from freetrain_parsl.screen import say, say_text
from freetrain_parsl.texts import printable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from freetrain_parsl.extensions.notebook.shown import ShownCampaign, ShownRun
    from freetrain_parsl.extensions.notebook.snapshot import RunSnapshot
    from freetrain_parsl.extensions.notebook.values import Picture
    from freetrain_parsl.protocol.options import OnCodeChange

__all__ = ["StartedRun", "WatchedRun"]

_POLL = 0.5  # seconds


class WatchedRun:
    """A run that can be looked at, not changed.

    Parameters
    ----------
    source
        Where its state is read.
    sleep
        Waits between looks.
    """

    def __init__(self, source: ShownRun, sleep: Callable[[float], None] = time.sleep) -> None:
        self._source = source
        self._sleep = sleep
        self._display = LiveDisplay(source, lambda: (self.timeline(), self.curves()))

    @property
    def directory(self) -> Path:
        """The run directory, or Parsl's."""
        return self._source.directory

    @property
    def state(self) -> str:
        """The state of the run in one word, such as ``running`` or ``finished``."""
        return self.snapshot().state

    def snapshot(self) -> RunSnapshot:
        """Return the state of the run and of its training jobs now."""
        return self._source.snapshot()

    def results(self) -> Any:
        """Return one row for each training job: a `pandas.DataFrame` if pandas is installed, else a list of dicts.

        The columns are ``state``, ``done`` (the fraction of its samples), the numbers and texts of the result, and
        ``error`` where a training job has failed.

        Raises
        ------
        InvalidInput
            The run was refused when its driver started, has not been created yet, or was removed.
        """
        return results_table(self._source.results())

    def timeline(self) -> Picture:
        """Draw the nodes over time, with training jobs and jobs of others; needs matplotlib (extra ``report``)."""
        return self._source.timeline(self._source.snapshot().title)

    def curves(self) -> Picture:
        """Draw the loss and what training jobs log against steps; needs matplotlib (extra ``report``)."""
        return curves_picture(self._source.changes(), self._source.snapshot().title)

    def logs(self, training: str | None = None, *, tail: int | None = None) -> TextLines:
        """Return what a training job has printed, or all of them, merged by time.

        Parameters
        ----------
        training
            Its name.
        tail
            Number of lines at the end; ``None``: all.

        Raises
        ------
        InvalidInput
            There is no such training job.
        """
        names = [] if training is not None else trainings_of(self.directory)
        width = name_width(names)
        lines = log_lines(self.directory, training, tail=tail)
        return TextLines(tuple(shown_line(line, width) for line in lines))

    def explain(self) -> TextLines:
        """Explain why training jobs wait, and why those that have no result ended."""
        return TextLines(tuple(self._source.explanation()))

    def wait(self, timeout: float | None = None) -> str:
        """Block until the run is over; an interruption of the kernel ends the waiting, not the run.

        Parameters
        ----------
        timeout
            Seconds; ``None``: no limit.

        Returns
        -------
        str
            Its state.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not (seen := self._source.snapshot()).over and (end is None or time.monotonic() < end):
            self._sleep(_POLL)
        if seen.over:
            self._display.settle()
        return seen.state

    def show(self) -> None:
        """Show the run in the output of the current cell, where it continues updating until the run ends."""
        if in_kernel():
            self._display.open()
        else:
            say_text(f"{self._source.snapshot().text()}\n")

    def __repr__(self) -> str:
        return str(self._repr_mimebundle_()["text/plain"])

    def _ipython_display_(self) -> None:
        """Show the run where it is the last expression of a cell: unless the cell shows it, as that of ``start()``."""
        if not in_kernel():
            say_text(f"{self}\n")
        elif not self._display.is_in_this_cell:
            try:
                self._display.open()
            except FreeTrainError as error:  # IPython would print a traceback
                say(str(error))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:  # noqa: ARG002 - IPython's
        try:
            return bundle_of(self._source.snapshot())
        except FreeTrainError as error:  # IPython would print a traceback
            return {"text/plain": printable(str(error))}


class StartedRun(WatchedRun):
    """A run of a campaign that this notebook has started or attached to.

    Parameters
    ----------
    source
        Its run directory.
    controls
        Whether this notebook may stop and resume it.
    sleep
        Waits between looks.
    """

    def __init__(self, source: ShownCampaign, *, controls: bool, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(source, sleep)
        self._campaign = source
        self.controls = controls

    def stop(self, timeout: float = 120.0) -> str:
        """Ask the driver to save all training jobs, cancel its batch jobs and exit; wait until it has.

        Parameters
        ----------
        timeout
            Seconds.

        Returns
        -------
        str
            The state of the run.

        Raises
        ------
        InvalidInput
            Another notebook controls the run.
        """
        self.check_control("stop")
        end = time.monotonic() + timeout
        while (state := self.state) == "starting" and time.monotonic() < end:
            self._sleep(_POLL)  # a driver that begins ignores earlier requests
        if state == "running":
            RunStore(self._campaign.directory).request_stop()
        return self.wait(max(0.0, end - time.monotonic()))

    def resume(self, *, on_code_change: OnCodeChange | None = None, retry_failed: bool = False) -> None:
        """Continue a run that was stopped, or whose driver has died; it is shown as by ``start``.

        Parameters
        ----------
        on_code_change
            What to do with training jobs whose code has changed: ``"refuse"``, ``"resume"`` from their checkpoints, or
            ``"restart"``. Default: as set in the campaign.
        retry_failed
            Whether failed training jobs are retried from their checkpoints.

        Raises
        ------
        InvalidInput
            The driver runs, or another notebook controls the run.
        """
        self.check_control("resume")
        command = ["resume", str(self.directory), "--detach"]
        if on_code_change is not None:
            command += ["--on-code-change", on_code_change]
        if retry_failed:
            command.append("--retry-failed")
        run_command(command)
        self.show()

    def check_control(self, verb: str) -> None:
        """Refuse what only the notebook that controls the run may do.

        Raises
        ------
        InvalidInput
            It is another one.
        """
        if not self.controls:
            other = controller_of(self.directory)
            there = f"in the notebook that controls it ({other}), or " if other else ""
            raise InvalidInput(
                f"{self.directory} is shown here read-only; {verb} it {there}in a shell: "
                f"freetrain {verb} {self.directory}"
            )
