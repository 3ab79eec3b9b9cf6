"""A batch system that says what a test wants, in place of the one that a verb would ask."""

from __future__ import annotations

import typer
from typer.testing import CliRunner

from freetrain_parsl.cli import sources
from freetrain_parsl.windows.base import Survey, WindowSource


class FixedSource(WindowSource):
    """Gives the surveys one after the other, the last for ever; an error among them is raised."""

    def __init__(self, *surveys: Survey | Exception, jobs: dict[str, str] | None = None) -> None:
        self.surveys = list(surveys)
        self.jobs = jobs or {}
        self.asked: list[tuple[str, ...]] = []
        self.checked: list[float] = []

    def survey(self, job_ids=()):
        self.asked.append(tuple(job_ids))
        answer = self.surveys.pop(0) if len(self.surveys) > 1 else self.surveys[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def cancel(self, job_ids):
        raise AssertionError("a verb that only asks ended a job")

    def find_jobs(self, prefix):
        return {job: name for job, name in self.jobs.items() if name.startswith(prefix)}

    def check(self, least_walltime):
        self.checked.append(least_walltime)


def run_verb(monkeypatch, verb, source: WindowSource, *arguments: str):
    """Run a verb on `source` instead of the Slurm that it believes to ask."""
    monkeypatch.setattr(sources, "_make_source", lambda system, options: source)
    app = typer.Typer()
    app.command()(verb)
    return CliRunner().invoke(app, ["--system", "slurm", *arguments])
