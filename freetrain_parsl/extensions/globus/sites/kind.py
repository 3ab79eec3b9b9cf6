"""Runs at several sites, for the commands that work with any run: ``run``, ``resume``, ``status`` and others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from freetrain_parsl.campaign.directories import RunKind
from freetrain_parsl.campaign.summary import driver_line
from freetrain_parsl.cli.sources import errors_in_one_line
from freetrain_parsl.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from freetrain_parsl.campaign.stored_run import StoredRun

__all__ = ["SitesKind"]


class SitesKind(RunKind):
    """Runs of ``freetrain run --sites``."""

    name: ClassVar[str] = "sites"
    described: ClassVar[str] = "a run at several sites"

    def create(
        self,
        campaign: Path,
        file: Path,
        run_dir: Path | None,
        *,
        settings: Sequence[str],
        include: Sequence[Path],
        any_versions: bool,
        as_json: bool,
    ) -> None:
        """Create the run and coordinate the sites of the list `file`; exits."""
        # Imported here, as below: most commands are about other runs.
        from freetrain_parsl.extensions.globus.sites.run import SitesRun
        from freetrain_parsl.extensions.globus.sites.view import coordinate_and_report

        with errors_in_one_line("run"):
            run = SitesRun.create(
                campaign, file, run_dir, settings=settings, include=include, any_versions=any_versions
            )
        coordinate_and_report(run, verb="run", as_json=as_json)

    def resume(self, run_dir: Path, *, retry: Sequence[str], retry_failed: bool, as_json: bool) -> None:
        """Continue to coordinate the sites; exits."""
        from freetrain_parsl.campaign.run import refuse_living_driver
        from freetrain_parsl.extensions.globus.sites.run import SitesRun
        from freetrain_parsl.extensions.globus.sites.view import coordinate_and_report

        run = SitesRun.reopen(run_dir)
        refuse_living_driver(run.store)
        retried = run.to_retry(retry, failed=retry_failed)
        coordinate_and_report(run, verb="resume", as_json=as_json, retry=retried)

    def stop(self, run_dir: Path) -> None:
        """Stop the sites of a run without a coordinator; exits."""
        from freetrain_parsl.extensions.globus.sites.run import SitesRun
        from freetrain_parsl.extensions.globus.sites.view import coordinate_and_report

        coordinate_and_report(SitesRun.reopen(run_dir), verb="stop", as_json=False, stop=True)

    def lines(self, store: StoredRun) -> list[str]:
        """Describe the sites of a run, as its coordinator has seen them last."""
        from freetrain_parsl.extensions.globus.sites.state import site_lines

        return site_lines(store.directory)

    def explain(self, store: StoredRun) -> dict[str, Any]:
        """Describe where the training jobs of a run are and why, as its coordinator has decided last.

        Returns
        -------
        dict of str to Any
            ``coordinator``: whether it runs, in words; ``sites``: a line each; ``trainings``: ``name``, ``state``,
            ``site`` (``None``: at none yet), ``reason``, ``moves``; ``starts``: site -> the last ones, in seconds.

        Raises
        ------
        InvalidInput
            Its state is damaged.
        """
        from freetrain_parsl.extensions.globus.sites.state import COORDINATOR, CoordinatorFile

        kept = CoordinatorFile.read(store.directory) or CoordinatorFile({"trainings": {}, "sites": {}}, ())
        nowhere = {"ended_at": "", "site": None, "reason": "", "moves": 0}
        try:
            trainings = []
            for item in store.trainings():
                placed = kept.document["trainings"].get(item.name, nowhere)
                trainings.append(
                    {
                        "name": item.name,
                        "state": item.state,
                        "site": placed["ended_at"] or placed["site"],
                        "reason": placed["reason"] if item.state in ("waiting", "running") else "",
                        "moves": placed["moves"],
                    }
                )
            return {
                "coordinator": driver_line(store),
                "sites": list(kept.lines),
                "trainings": trainings,
                "starts": {name: list(map(float, one["starts"])) for name, one in kept.document["sites"].items()},
            }
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInput(f"{store.directory / COORDINATOR} is damaged: {error!r}") from None

    def sentences(self, figures: dict[str, Any]) -> Iterator[str]:
        """Yield what `explain` has found, in lines."""
        yield figures["coordinator"]
        yield from figures["sites"]
        for name, starts in figures["starts"].items():
            if starts:
                took = ", ".join(f"{start:.0f} s" for start in starts)
                yield f"site {name}: the last starts of training jobs that are new there took {took}"
        for training in figures["trainings"]:
            where = f" at {training['site']}" if training["site"] else ""
            why = training["reason"]
            if not why and training["state"] == "waiting":
                why = "no decision has been made yet"
            moved = {0: "", 1: "; moved once"}.get(training["moves"], f"; moved {training['moves']} times")
            yield f"{training['name']} {training['state']}{where}{f': {why}' if why else ''}{moved}"
