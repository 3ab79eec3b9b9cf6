"""The fake Slurm commands: ``python -m tests.support.fake_commands.slurm DIRECTORY COMMAND …``."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.errors import BatchSystemError, InvalidSettings
from freetrain_parsl.windows.hostlist import expand_hosts
from tests.support.fake_commands import slurm_answers as answers
from tests.support.fake_commands.mishaps import suffer
from tests.support.fake_commands.options import Options, Refused, directives, parse
from tests.support.fake_commands.steps import StepTask, run_tasks, stay_at_sigterm
from tests.support.fake_commands.store import QUEUES, Store, Submission

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

_SBATCH_VALUED = (
    "account",
    "chdir",
    "constraint",
    "cpus-per-task",
    "error",
    "exclude",
    "gpus-per-node",
    "gres",
    "job-name",
    "mem",
    "nodelist",
    "nodes",
    "ntasks-per-node",
    "output",
    "partition",
    "qos",
    "signal",
    "time",
)
_SBATCH_SHORT = {
    "A": "account",
    "D": "chdir",
    "J": "job-name",
    "N": "nodes",
    "e": "error",
    "o": "output",
    "p": "partition",
    "t": "time",
    "w": "nodelist",
    "x": "exclude",
}
_MINUTE = 60.0
_DAY_MINUTES = 24 * 60.0
_MIN_AGE = 300.0  # s; MinJobAge: how long Slurm keeps a job that has ended


def sbatch(store: Store, arguments: list[str]) -> None:
    """Submit a batch script."""

    def read(words: list[str]) -> Options:
        return parse(
            words,
            flags=("exclusive", "no-requeue", "parsable", "requeue"),
            valued=_SBATCH_VALUED,
            short=_SBATCH_SHORT,
            until_word=True,
        )

    given = read(arguments)
    if not given.words:
        raise Refused("the fake reads batch scripts from files only")
    try:
        script = Path(given.words[0]).read_text(encoding="utf-8")
    except OSError:
        raise Refused(f"Unable to open file {given.words[0]}") from None
    if not script.startswith("#!"):
        raise Refused("This does not look like a batch script.  The first line must start with #!")
    options = Options({**read(directives(script, "#SBATCH")).values, **given.values}, given.words)
    nodes, wanted = _node_count(options), None
    if "nodelist" in options:
        wanted = tuple(expand_hosts(options.get("nodelist")))
        if len(wanted) != nodes:
            raise Refused("Batch job submission failed: the fake accepts node lists of exactly the requested size only")
    elif "exclude" in options:
        excluded = set(expand_hosts(options.get("exclude")))
        wanted = tuple(name for name in store.client.nodes() if name not in excluded)
    partition = options.get("partition", QUEUES[0])
    if partition not in QUEUES:
        raise Refused("Batch job submission failed: invalid partition specified: " + partition)
    stdout = Path(options.get("output", "slurm-%j.out"))
    if "%" in str(stdout):
        stdout = Path("slurm.out")  # the job's number is known only after submission
    name = options.get("job-name", Path(given.words[0]).name)
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    env |= {"SLURM_JOB_NAME": name, "SLURM_JOB_PARTITION": partition, "SLURM_CLUSTER_NAME": "fake"}
    minutes = _minutes(options.get("time", "10"))
    submission = Submission(
        name,
        partition,
        nodes,
        minutes * _MINUTE,
        wanted,
        stdout,
        Path(options.get("error")) if "error" in options else stdout,
        env,
    )
    try:
        job = store.submit(script, submission)
    except InvalidSettings as error:
        raise Refused(f"Batch job submission failed: {error}") from None
    _print(job if "parsable" in options else f"Submitted batch job {job}")


def squeue(store: Store, arguments: list[str]) -> None:
    """Print jobs."""
    options = parse(
        arguments,
        flags=("all", "json", "noheader", "local"),
        valued=("format", "Format", "jobs", "job", "states", "user", "name"),
        short={"O": "Format", "a": "all", "h": "noheader", "j": "jobs", "o": "format", "t": "states", "u": "user"},
    )
    jobs = list(store.jobs().values())
    now = answers.now(store)
    jobs = [job for job in jobs if job.end is None or (options.get("states") == "all" and now - job.end < _MIN_AGE)]
    if "user" in options:
        jobs = [job for job in jobs if job.user == options.get("user")]
    if wanted := options.get("jobs") or options.get("job"):
        jobs = [job for job in jobs if job.id in wanted.split(",")]
    if "json" in options:
        _require_json(store)
        _print(answers.jobs_json(store, jobs))
        return
    if "noheader" not in options:
        raise Refused("the fake prints no header: use --noheader")
    for job in jobs:
        if "Format" in options:
            _print(answers.long_line(job, options.get("Format")))
        else:
            _print(answers.short_line(job, options.get("format", "%i %P %j %u %t %M %D %N")))


def scontrol(store: Store, arguments: list[str]) -> None:
    """Show nodes, partitions, reservations, jobs or the configuration."""
    options = parse(arguments, flags=("all", "details", "json", "oneliner"), short={"a": "all", "d": "details"})
    if options.words[:1] != ["show"] or len(options.words) < 2:
        raise Refused(f"invalid keyword: the fake knows only 'show', not {' '.join(options.words)!r}")
    what = options.words[1].rstrip("s")
    if "json" in options:
        _require_json(store)
        if what != "node":
            raise Refused(f"the fake has no JSON of {what!r}")
        _print(answers.nodes_json(store))
        return
    known: dict[str, Callable[[Store], str]] = {
        "config": answers.config,
        "node": answers.nodes_text,
        "partition": answers.partitions,
        "reservation": answers.reservations,
    }
    if what not in known or len(options.words) > 2:
        raise Refused(f"invalid entity: the fake does not show {' '.join(options.words[1:])!r}")
    _print(known[what](store))


def sinfo(store: Store, arguments: list[str]) -> None:
    """Print a human-readable overview."""
    parse(arguments)
    _print(answers.overview(store))


def scancel(store: Store, arguments: list[str]) -> None:
    """End jobs."""
    options = parse(arguments, flags=("quiet",), valued=("name", "user"), short={"Q": "quiet", "u": "user"})
    jobs = options.words
    if "name" in options or "user" in options:
        jobs = [
            job.id
            for job in store.jobs().values()
            if job.name == options.get("name", job.name) and job.user == options.get("user", job.user)
        ]
    known = store.jobs(jobs)
    store.client.cancel([job for job in jobs if job in known])
    unknown = [job for job in jobs if job not in known]
    if unknown:
        raise Refused(f"Kill job error on job id {unknown[0]}: Invalid job id specified")


def sacct(_: Store, __: list[str]) -> None:
    """Fail: the fake cluster has no accounting."""
    raise Refused("Slurm accounting storage is disabled")


def srun(_: Store, arguments: list[str]) -> None:
    """Start the tasks of a step on the nodes of the current job."""
    options = parse(
        arguments,
        flags=("exclusive", "label", "overlap"),
        valued=("cpus-per-task", "nodes", "ntasks", "ntasks-per-node"),
        short={"N": "nodes", "c": "cpus-per-task", "l": "label", "n": "ntasks"},
        until_word=True,
    )
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or "FREETRAIN_CLUSTER" not in os.environ:
        raise Refused("the fake runs inside batch jobs only")
    nodes = expand_hosts(os.environ["SLURM_JOB_NODELIST"])
    nodes = nodes[: int(options.get("nodes", str(len(nodes))))]
    count = int(options.get("ntasks") or len(nodes) * int(options.get("ntasks-per-node", "1")))
    per_node = -(-count // len(nodes))  # block distribution
    tasks = []
    for number in range(count):
        node, local = divmod(number, per_node)
        place = {
            "SLURM_PROCID": str(number),
            "SLURM_LOCALID": str(local),
            "SLURM_NODEID": str(node),
            "SLURMD_NODENAME": nodes[node],
            "SLURM_NTASKS": str(count),
            "SLURM_STEP_ID": "0",
        }
        tasks.append(StepTask(node, place))
    stay_at_sigterm()
    sys.stdout.flush()
    code = run_tasks(job, options.words, tasks, label="label" in options)
    if code:
        _print(f"srun: error: {nodes[0]}: task 0: Exited with exit code {code}", sys.stderr)
        sys.exit(code if code > 0 else 128 - code)


COMMANDS = {command.__name__: command for command in (sacct, sbatch, scancel, scontrol, sinfo, squeue, srun)}


def main(directory: str, name: str, arguments: list[str]) -> int:
    """Act as the command `name`."""
    store = Store(Path(directory))
    store.note_call([name, *arguments])
    suffer(store.directory, store.settings.kind, name)
    if arguments in (["--version"], ["-V"]):
        _print(f"slurm {store.settings.version}")
        return 0
    try:
        COMMANDS[name](store, arguments)
    except Refused as refusal:
        _print(f"{name}: error: {refusal}", sys.stderr)
        return refusal.code
    except BatchSystemError as error:  # the cluster is gone: emulate a controller that is down
        _print(f"{name}: error: Unable to contact slurm controller (connect failure): {error}", sys.stderr)
        return 1
    return 0


def _node_count(options: Options) -> int:
    text = options.get("nodes") or (str(len(expand_hosts(options.get("nodelist")))) if "nodelist" in options else "1")
    if not re.fullmatch(r"[1-9]\d*", text):
        raise Refused(f"invalid number of nodes (-N {text}); the fake accepts one number only")
    return int(text)


def _minutes(text: str) -> float:
    """Parse a time limit as Slurm does, in whole minutes: a bare number is minutes, zero is unlimited."""
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")] if re.fullmatch(r"\d+(:\d+){0,2}", rest) else []
    if not parts or (dash and not days.isdecimal()):
        raise Refused(f"Invalid --time specification: {text}")
    if dash:
        parts = [*parts, 0, 0][:3]
        minutes = int(days) * _DAY_MINUTES + 60 * parts[0] + parts[1] + (parts[2] > 0)
    elif len(parts) == 3:
        minutes = 60 * parts[0] + parts[1] + (parts[2] > 0)
    else:
        minutes = parts[0] + (len(parts) == 2 and parts[1] > 0)
    return float(minutes) or 365 * _DAY_MINUTES


def _require_json(store: Store) -> None:
    if not answers.has_json(store):
        raise Refused("unrecognized option '--json': this version of the fake has no such option")


def _print(text: str, file: TextIO | None = None) -> None:
    print(text, file=file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
