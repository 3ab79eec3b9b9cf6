"""The fake PBS commands: ``python -m tests.support.fake_commands.pbs DIRECTORY COMMAND …``."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.errors import BatchSystemError, InvalidSettings
from freetrain_parsl.extensions.pbs.values import as_duration
from tests.support.fake_commands import pbs_answers as answers
from tests.support.fake_commands.mishaps import suffer
from tests.support.fake_commands.options import Options, Refused, directives, parse
from tests.support.fake_commands.steps import StepTask, run_tasks, stay_at_sigterm
from tests.support.fake_commands.store import QUEUES, Store, Submission

if TYPE_CHECKING:
    from typing import TextIO

_QSUB_VALUED = "ANSejlmoqrv"
_PASSED_ON = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TZ", "USER", "XDG_RUNTIME_DIR", "TMPDIR")
"""Variables of the caller's environment that a job inherits. A real job has the environment of a login shell."""

_UNKNOWN_JOB = 153
_FINISHED_JOB = 35
_LONGEST = 5 * 365 * 86400.0


def qsub(store: Store, arguments: list[str]) -> None:
    """Submit a batch script."""
    given, given_resources, words = _qsub_options(arguments)
    if not words:
        raise Refused("the fake reads batch scripts from files only")
    try:
        script = Path(words[0]).read_text(encoding="utf-8")
    except OSError:
        raise Refused("script file:: No such file or directory") from None
    options, resources, _ = _qsub_options(directives(script, "#PBS"))
    options |= given
    resources |= given_resources
    queue = options.get("q", QUEUES[0])
    if queue not in QUEUES:
        raise Refused("Unknown queue", 170)
    name = options.get("N", Path(words[0]).name)
    walltime = as_duration(resources.get("max_walltime") or resources.get("walltime"))
    env = {key: os.environ[key] for key in _PASSED_ON if key in os.environ}
    env |= {f"PBS_O_{key}": os.environ[key] for key in ("HOME", "PATH") if key in os.environ}
    env |= {name: os.environ[name] for name in options.get("v", "").split(",") if name in os.environ}
    env |= {"PBS_JOBNAME": name, "PBS_QUEUE": queue, "PBS_O_QUEUE": queue, "PBS_O_WORKDIR": str(Path.cwd())}
    stdout = Path(options.get("o", f"{name}.o"))
    stderr = stdout if "o" in options.get("j", "") else Path(options.get("e", f"{name}.e"))
    submission = Submission(
        name,
        queue,
        _chunks(resources.get("select", "1")),
        _LONGEST if walltime is None else walltime,
        _named_nodes(resources.get("select", "1"), store),
        stdout,
        stderr,
        env,
    )
    try:
        job = store.submit(script if script.startswith("#!") else f"#!/bin/sh\n{script}", submission)
    except InvalidSettings as error:
        raise Refused(f"Job violates queue and/or server resource limits: {error}", 188) from None
    _print(answers.full_id(job))


def _qsub_options(arguments: list[str]) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Parse qsub's options: letter -> value, the combined ``-l`` requests, and the remaining words."""
    options: dict[str, str] = {}
    resources: dict[str, str] = {}
    left = list(arguments)
    while left and left[0].startswith("-"):
        word = left.pop(0)
        letter, value = word[1:2], word[2:]
        if letter not in _QSUB_VALUED:
            raise Refused(f"illegal option {word}: the fake does not know it", 2)
        if not value and not left:
            raise Refused(f"option {word} needs a value", 2)
        value = value or left.pop(0)
        if letter == "l":
            resources.update(item.partition("=")[::2] for item in re.split(r",(?=\w+=)", value))
        else:
            options[letter] = value
    return options, resources, left


def qstat(store: Store, arguments: list[str]) -> None:
    """Print jobs, queues or the server, as JSON."""
    options = parse(arguments, flags=("f", "x", "Q", "B", "Qf", "Bf", "fx", "xf"), valued=("F",))
    letters = {letter for name in options.values if name != "F" for letter in name}
    if options.get("F").lower() != "json" or "f" not in letters:
        raise Refused("the fake prints JSON only: use -f -F json")
    if "Q" in letters:
        _print(answers.queues(store))
        return
    if "B" in letters:
        _print(answers.server(store))
        return
    jobs = store.jobs()
    ended = {job for job, info in jobs.items() if info.end is not None and "x" not in letters}
    wanted = [word.partition(".")[0] for word in options.words]
    complaints = []
    for job in wanted:
        if job not in jobs:
            complaints.append((f"Unknown Job Id {answers.full_id(job)}", _UNKNOWN_JOB))
        elif job in ended:
            complaints.append((f"{answers.full_id(job)} Job has finished, use -x or -H to obtain", _FINISHED_JOB))
    shown = [info for job, info in jobs.items() if job not in ended and (not wanted or job in wanted)]
    _print(answers.jobs(store, shown))
    if complaints:
        raise Refused(*complaints[0])


def pbsnodes(store: Store, arguments: list[str]) -> None:
    """Print nodes, as JSON."""
    options = parse(arguments, flags=("a", "v", "av"), valued=("F",))
    if options.get("F").lower() != "json" or options.words:
        raise Refused("the fake prints JSON of all vnodes only: use -av -F json")
    _print(answers.nodes(store))


def pbs_rstat(_: Store, arguments: list[str]) -> None:
    """Print reservations: always none."""
    parse(arguments, flags=("f", "F", "B", "S"))


def qmgr(_: Store, arguments: list[str]) -> None:
    """Print the scheduler's attributes."""
    if arguments != ["-c", "list sched"]:
        raise Refused(f"the fake knows only -c 'list sched', not {' '.join(arguments)!r}")
    _print(answers.SCHEDULER)


def qdel(store: Store, arguments: list[str]) -> None:
    """End jobs; continue after one that cannot be ended."""
    jobs = [word.partition(".")[0] for word in parse(arguments, valued=("W",)).words]
    known = store.jobs(jobs)
    living = [job for job in jobs if job in known and known[job].end is None]
    store.client.cancel(living)
    complaints = []
    for job in jobs:
        if job not in known:
            complaints.append((f"Unknown Job Id {answers.full_id(job)}", _UNKNOWN_JOB))
        elif job not in living:
            complaints.append((f"Job has finished {answers.full_id(job)}", _FINISHED_JOB))
    if complaints:
        raise Refused(*complaints[0])


def mpiexec(_: Store, arguments: list[str]) -> None:
    """Start tasks on the nodes of the current job."""
    options: Options = parse(
        arguments,
        flags=("l", "prepend-rank"),
        valued=("bind-to", "cpu-bind", "depth", "hostfile", "n", "np", "ppn"),
        until_word=True,
    )
    job = os.environ.get("PBS_JOBID", "").partition(".")[0]
    if not job or "FREETRAIN_CLUSTER" not in os.environ:
        raise Refused("the fake runs inside batch jobs only")
    nodes = Path(os.environ["PBS_NODEFILE"]).read_text(encoding="utf-8").split()
    hosts = nodes
    if "hostfile" in options:
        hosts = [line.split()[0] for line in Path(options.get("hostfile")).read_text(encoding="utf-8").splitlines()]
    strangers = set(hosts) - set(nodes)
    if strangers:
        raise Refused(f"{min(strangers)} is not a node of job {job}")
    count = int(options.get("n") or options.get("np") or len(hosts))
    per_node = int(options.get("ppn", "1"))
    tasks = []
    for number in range(count):
        host = hosts[number // per_node % len(hosts)]
        rank = {"PMI_RANK": str(number), "PMI_SIZE": str(count), "PALS_RANKID": str(number)}
        tasks.append(StepTask(nodes.index(host), rank))
    stay_at_sigterm()
    code = run_tasks(job, options.words, tasks, label="l" in options or "prepend-rank" in options)
    if code:
        sys.exit(code if code > 0 else 128 - code)


COMMANDS = {command.__name__: command for command in (mpiexec, pbs_rstat, pbsnodes, qdel, qmgr, qstat, qsub)}


def main(directory: str, name: str, arguments: list[str]) -> int:
    """Act as the command `name`."""
    store = Store(Path(directory))
    store.note_call([name, *arguments])
    if name != "mpiexec":  # which queries no server
        suffer(store.directory, store.settings.kind, name)
    if arguments == ["--version"]:
        _print(f"pbs_version = {store.settings.version}")
        return 0
    try:
        COMMANDS[name](store, arguments)
    except Refused as refusal:
        _print(f"{name}: {refusal}", sys.stderr)
        return refusal.code
    except BatchSystemError as error:  # the cluster is gone: emulate a server that is down
        _print(f"{name}: cannot connect to server fake (errno=111): {error}", sys.stderr)
        return 1
    return 0


def _chunks(select: str) -> int:
    """Count the chunks; the fake places each on its own node."""
    counts = [chunk.partition(":")[0] for chunk in select.split("+")]
    return sum(int(count) if count.isdecimal() else 1 for count in counts)


def _named_nodes(select: str, store: Store) -> tuple[str, ...] | None:
    """Return the nodes that a selection names or, for one of an island, the first free ones of it."""
    if named := re.findall(r":(?:host|vnode)=([^:+]+)", select):
        return tuple(named)
    if island := re.search(r":island=([^:+]+)", select):
        free = [name for name, job in store.node_jobs().items() if job is None]
        return tuple(answers.on_island(island[1], free, list(store.node_jobs())))[: _chunks(select)] or None
    return None


def _print(text: str, file: TextIO | None = None) -> None:
    print(text, file=file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
