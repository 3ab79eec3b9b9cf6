"""The loop around the coordinator: the calls to the sites, signals, and what is stored before it is acted upon."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from freetrain_parsl.campaign.environment import KEEP
from freetrain_parsl.campaign.lock import BEAT
from freetrain_parsl.errors import FreeTrainError, PlanningError, RemoteError, UsageError
from freetrain_parsl.extensions.globus.remote.compute import HUNG
from freetrain_parsl.extensions.globus.remote.messages import checked_answer, parse_status
from freetrain_parsl.extensions.globus.remote.verbs import DIRECTORY
from freetrain_parsl.extensions.globus.sites.kind import CoordinatorFile
from freetrain_parsl.extensions.globus.sites.state import Ask, SiteAnswer, SiteFacts
from freetrain_parsl.extensions.globus.storage.login import CLIENT_SECRET
from freetrain_parsl.interpreters import script_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from freetrain_parsl.extensions.globus.sites.coordinator import Coordinator
    from freetrain_parsl.extensions.globus.sites.run import SitesRun
    from freetrain_parsl.extensions.globus.sites.state import SiteCall

    Show = Callable[[Coordinator, float], None]

__all__ = ["LocalPlace", "SitePlace", "SitesLoop"]

_PERIOD = 0.25  # seconds between polls of answers and signals
_CALL_TIMEOUT = 120.0  # seconds
_STOP_WAIT = 45.0  # seconds for which a site waits for its driver to end
_ANSWER = (
    "import json, sys\n"
    "from freetrain_parsl.extensions.globus.remote.verbs import answer\n"
    "json.dump(answer(json.load(sys.stdin)), sys.stdout)\n"
)


class SitePlace(Protocol):
    """Something that answers the verbs of `extensions.globus.remote.verbs`, such as a `ComputeEndpoint`."""

    def call(self, request: Mapping[str, Any], timeout: float = ...) -> dict[str, Any]:
        """Call a verb and wait for its answer.

        Raises
        ------
        InvalidInput
            The site refuses the request.
        RemoteError
            It did not answer in time, or failed.
        """


class LocalPlace:
    """A site on this machine, with runs in a directory: each call is a short process of its own, as at an endpoint."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def call(self, request: Mapping[str, Any], timeout: float = 120.0) -> dict[str, Any]:
        """Call a verb; see `SitePlace.call`."""
        # The mover of the driver logs in with them; it removes the secret before it starts jobs.
        kept = [CLIENT_SECRET, *(name for name in os.environ if name.startswith("GLOBUS_SDK_"))]
        environment = {
            **os.environ,
            DIRECTORY: str(self._directory),
            KEEP: ",".join(filter(None, [os.environ.get(KEEP), *kept])),
        }
        try:
            done = subprocess.run(
                script_command(_ANSWER),
                input=json.dumps(request),
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
                start_new_session=True,  # Ctrl-C is the coordinator's
            )
        except subprocess.TimeoutExpired:
            raise RemoteError(f"no answer within {timeout:.0f} s") from None
        try:
            document = json.loads(done.stdout)
        except ValueError:
            lines = done.stderr.strip().splitlines() or [f"it exited with code {done.returncode}"]
            raise RemoteError(f"the call failed on this machine: {lines[-1][:500]}") from None
        return checked_answer(document)


@dataclass
class SitesLoop:
    """One process's loop over a run at several sites.

    `driver` is the number of this process in the store, and `caught` has signals, as they arrive; see `SitesRun.drive`.
    """

    run: SitesRun
    coordinator: Coordinator
    driver: int
    caught: list[int]
    report: Callable[[str], None]
    show: Show

    def __post_init__(self) -> None:
        self._outcomes: SimpleQueue[tuple[SiteCall, Mapping[str, Any] | FreeTrainError]] = SimpleQueue()
        self._places = {name: self.run.place_of(self.run, name) for name in self.coordinator.sites}
        self._busy: dict[str, tuple[SiteCall, float]] = {}  # site -> the call that it answers, and since when
        self._calls: list[SiteCall] = []  # to be made once the state is stored
        self._unwritable = False
        self._saved: tuple[dict[str, Any], list[tuple[str, bool]]] = ({}, [])
        self._stored: set[str] = {name for name, item in self.coordinator.trainings.items() if item.ended is not None}

    def drive(self, *, stop: bool) -> str:
        """Coordinate until all has ended; see `SitesRun.drive`."""
        coordinator, store = self.coordinator, self.run.store
        begin = time.monotonic()
        next_beat, how, heard = begin, "finished", 0
        if stop:
            how = "stopped"
            coordinator.stop()
        while True:
            self._take_outcomes()
            self._calls += coordinator.due(self.run.clock())
            with self._writing():
                self._save()
                for call in self._calls:
                    self._submit(call)
                self._calls.clear()
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + BEAT
                    self._beat()
                    for name in store.cancellations():
                        coordinator.cancel(name)
                    if store.stop_requested() and not coordinator.stopping:
                        how = "stopped"
                        self._stop()
            self.show(coordinator, time.monotonic() - begin)
            if coordinator.is_done and not self._unwritable:
                self._report_not_stopped()
                with self._writing():
                    self._save()
                    self._beat()
                if not self._unwritable:
                    return how
            if len(self.caught) > heard:
                if signal.SIGHUP in self.caught or coordinator.stopping:
                    return "detached"
                heard, how = len(self.caught), "interrupted"
                self._stop()
            time.sleep(_PERIOD)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Go on if the run directory cannot be written for now, e.g. because the disk is full; nothing is sent then."""
        try:
            yield
        except (OSError, sqlite3.OperationalError) as error:
            if not self._unwritable:
                self.report(f"the state of the run cannot be written to {self.run.store.directory}: {error}; retrying")
            self._unwritable = True
        else:
            self._unwritable = False

    def _stop(self) -> None:
        self.report(
            "stopping: the sites save their trainings and end their drivers; Ctrl-C again leaves them as they are"
        )
        self.coordinator.stop()

    def _report_not_stopped(self) -> None:
        for site in self.coordinator.sites.values():
            if self.coordinator.stopping and site.silent and site.facts is not None:
                self.report(f"site {site.name} could not be stopped, its trainings may go on: {site.silent}")
                self.run.unstopped[site.name] = "it does not answer, and its trainings may go on"

    # Calls.

    def _request(self, call: SiteCall) -> Mapping[str, Any]:
        prepared = self.run.requests[call.site]
        match call.ask:
            case Ask.PREPARE:
                return prepared
            case Ask.STOP:
                return {"verb": "stop", "run": prepared["run"], "wait": _STOP_WAIT}
        return {
            "verb": "look",
            "run": prepared["run"],
            "order": call.order,
            "trainings": list(call.trainings),
            "plan": call.ask is Ask.LOOK,
            "start": call.start,
            "retry": self.coordinator.attempts,
        }

    def _submit(self, call: SiteCall) -> None:
        """Make a call in a thread that does not keep the process alive."""
        place, request = self._places[call.site], self._request(call)

        def carry_out() -> None:
            try:
                self._outcomes.put((call, place.call(request, _CALL_TIMEOUT)))
            except FreeTrainError as error:
                self._outcomes.put((call, error))
            # The SDK's errors of tokens and sockets are many; none of them may end the campaign.
            except Exception as error:  # noqa: BLE001 - see above
                self._outcomes.put((call, RemoteError(f"{type(error).__name__}: {error}")))

        self._busy[call.site] = call, time.monotonic()
        threading.Thread(target=carry_out, name=f"freetrain-site-{call.site}", daemon=True).start()

    def _take_outcomes(self) -> None:
        while True:
            try:
                call, outcome = self._outcomes.get_nowait()
            except Empty:
                break
            if call.site in self._busy and self._busy[call.site][0] is call:  # otherwise it was given up
                del self._busy[call.site]
                self._take(call, outcome)
        for name, (_, since) in list(self._busy.items()):
            if time.monotonic() - since > HUNG:
                del self._busy[name]
                self._places[name] = self.run.place_of(self.run, name)
                self.coordinator.on_silence(name, f"no answer within {HUNG:.0f} s", self.run.clock())

    def _take(self, call: SiteCall, outcome: Mapping[str, Any] | FreeTrainError) -> None:
        coordinator, now = self.coordinator, self.run.clock()
        try:
            if isinstance(outcome, FreeTrainError):
                raise outcome
            match call.ask:
                case Ask.PREPARE:
                    coordinator.on_prepared(call.site, SiteFacts.parse(outcome), now)
                case Ask.STOP:
                    status = parse_status(outcome)
                    if status.state == "died":
                        self.report(
                            f"site {call.site}: its driver had died; its trainings have their last checkpoints, and "
                            "batch jobs may be left until the run continues"
                        )
                        self.run.unstopped[call.site] = "its driver had died, and its jobs may be left"
                    coordinator.on_stopped(call.site, over=status.over, now=now)
                case _:
                    coordinator.on_answer(call.site, self._checked(call, SiteAnswer.parse(outcome)), now)
        except UsageError as error:
            if call.ask is Ask.PREPARE and not any(item.site for item in coordinator.trainings.values()):
                raise type(error)(f"{self.run.entry(call.site).where}: site {call.site}: {error}") from None
            coordinator.on_silence(call.site, str(error), now)
        except PlanningError as error:
            self.report(f"no decision this time: {error}")
        except FreeTrainError as error:  # whatever a call raises, the other sites go on
            coordinator.on_silence(call.site, str(error), now)

    def _checked(self, call: SiteCall, answer: SiteAnswer) -> SiteAnswer:
        """Return an answer if it is about this run, with the home and the lease as before."""
        run, facts = self.run.requests[call.site]["run"], self.coordinator.sites[call.site].facts
        if answer.run != run:
            raise RemoteError(f"the site sent an answer about another run, {answer.run[:100]!r} instead of {run!r}")
        if facts is not None and answer.facts != facts:
            raise RemoteError(
                f"its home is now {answer.facts.home} with a lease of {answer.facts.lease:.0f} s, it was {facts.home} "
                f"with {facts.lease:.0f} s; undo that at the site: all sites need the same"
            )
        return answer

    # State.

    def _save(self) -> None:
        """Store what a later coordinator must know, and the results; before it is acted upon."""
        store, coordinator = self.run.store, self.coordinator
        for name, item in coordinator.trainings.items():
            if item.ended is None or name in self._stored:
                continue
            match item.ended.state:
                case "finished":
                    remark = "; ".join(filter(None, [f"at {item.ended_at}", item.ended.remark]))
                    store.finish(name, item.ended.result, remark)
                case "failed":
                    store.fail(name, f"at {item.ended_at}: {item.ended.error}", final=True)
                case _:
                    store.cancel(name)
            self._stored.add(name)
        document = coordinator.as_json()
        shown = [(site.silent, site.answer is None) for site in coordinator.sites.values()]
        if (document, shown) != self._saved:
            lines = list(coordinator.lines(self.run.clock()))
            CoordinatorFile(document, lines).write(self.run.store.directory)
            self._saved = (document, shown)

    def _beat(self) -> None:
        states: dict[str, tuple[str, float | None, Sequence[str]]] = {}
        remarks = {}
        for name, item in self.coordinator.trainings.items():
            if item.ended is not None:
                continue
            site = None if item.site is None else self.coordinator.sites[item.site]
            at_site = None if site is None else site.trainings.get(name)
            states[name] = ("waiting", None, ()) if at_site is None else (at_site.state, at_site.share, at_site.nodes)
            remarks[name] = "; ".join(
                filter(None, [f"at {item.site}" if item.site else "", at_site.remark if at_site else "", item.reason])
            )
        self.run.store.beat(self.driver, states, remarks)
