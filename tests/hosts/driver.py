"""A FreeTrainExecutor on the login host: takes jobs from its standard input, writes their results to its output.

Its argument is a JSON object: ``directory``, ``provider`` (``embedded`` or ``slurm``), ``nodes`` and ``enter`` (shell
code that enters a node's host) for the embedded cluster, ``nodes_per_block``, ``max_failed_blocks``, ``timeout`` (of
heartbeats and peers, seconds), and ``settings``: other arguments of the executor. The first line of output has the path
of the journal, or the start-up error. A line of input is a training job: ``name``, ``nodes``, ``epochs``, ``slow``; its
response has ``name`` and ``result`` or ``error``. The program ends at the end of the input.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import parsl
from parsl.config import Config
from parsl.launchers import SrunLauncher
from parsl.providers import SlurmProvider

from freetrain_parsl import EmbeddedClusterProvider, FreeTrainExecutor
from tests.batch_systems.backends import WORKER_INIT
from tests.executor.scenario import CHECKPOINTS, PLANNER, RATE_LIMITS, TRAININGS, ScriptedPolicy, make_app


class _HostsProvider(EmbeddedClusterProvider):
    """An embedded cluster whose nodes are hosts: they do not reach the driver over the loopback."""

    driver_address = None


def _provider(plan):
    if plan["provider"] == "slurm":
        return SlurmProvider(partition="preemptible", launcher=SrunLauncher(), worker_init=WORKER_INIT, cmd_timeout=10)
    directory = str(Path(plan["directory"], "cluster"))
    return _HostsProvider(
        nodes=plan["nodes"], cluster_dir=directory, worker_init=plan["enter"], grace=timedelta(seconds=4)
    )


def _say(**words) -> None:
    print(json.dumps(words), flush=True)


def _tell(name, done) -> None:
    error = done.exception()
    if error is None:
        _say(name=name, result=done.result())
    else:
        _say(name=name, error=f"{type(error).__name__}: {error}")


def main() -> None:
    plan = json.loads(sys.argv[1])
    directory = Path(plan["directory"])
    policy = ScriptedPolicy(1)
    timeout = timedelta(seconds=plan["timeout"])
    try:
        executor = FreeTrainExecutor(
            provider=_provider(plan),
            policy=policy,
            planner=replace(
                PLANNER,
                max_nodes_per_block=plan["nodes_per_block"],
                join_timeout=timedelta(minutes=3),
                idle_timeout=timedelta(minutes=5),
                max_walltime=timedelta(minutes=15),
            ),
            trainings=replace(TRAININGS, heartbeat_timeout=timeout, peer_timeout=timeout),
            rate_limits=replace(RATE_LIMITS, max_failed_blocks=plan["max_failed_blocks"]),
            checkpoint_dir=directory / "checkpoints",
            checkpoints=CHECKPOINTS,
            **plan["settings"],
        )
        run_dir = str(directory / "runinfo")
        parsl.load(Config(executors=[executor], run_dir=run_dir, strategy="none", initialize_logging=False))
    except Exception as error:  # noqa: BLE001 - report any start-up error to the test
        _say(error=f"{type(error).__name__}: {error}")
        return
    _say(journal=str(executor.journal_path), addresses=sorted(executor.all_addresses))
    for line in sys.stdin:
        order = json.loads(line)
        policy.nodes = order["nodes"]
        app = make_app(max_nodes=order["nodes"]).options(name=order["name"])
        app(epochs=order["epochs"], slow=order["slow"], pause=0.6).add_done_callback(partial(_tell, order["name"]))
    parsl.dfk().cleanup()


if __name__ == "__main__":
    main()
