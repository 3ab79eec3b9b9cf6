"""A batch system with prepared responses, in place of the one that a verb would query."""

from __future__ import annotations

import typer
from typer.testing import CliRunner

from freetrain_parsl.cli import sources
from freetrain_parsl.windows.base import Survey, WindowSource


class FixedSource(WindowSource):
    """Returns the surveys in sequence, repeating the last; errors among them are raised."""

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
        raise AssertionError("a read-only verb ended a job")

    def find_jobs(self, prefix):
        return {job: name for job, name in self.jobs.items() if name.startswith(prefix)}

    def check(self, least_walltime):
        self.checked.append(least_walltime)


def run_verb(monkeypatch, verb, source: WindowSource, *arguments: str):
    """Run a verb on `source` instead of Slurm."""
    monkeypatch.setattr(sources, "_make_source", lambda system, options: source)
    app = typer.Typer()
    app.command()(verb)
    return CliRunner().invoke(app, ["--system", "slurm", *arguments])
