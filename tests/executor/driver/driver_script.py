"""Run by test_exit.py in a separate process: one training job on a cluster that outlives the driver."""

import json
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta

import parsl
from parsl.config import Config

from freetrain_parsl import CheckpointSettings, EmbeddedClusterProvider, FreeTrainExecutor
from freetrain_parsl.report.projection.run import RunState
from tests.executor.scenario import PLANNER, RATE_LIMITS, TRAININGS, make_app


def main(cluster: str, directory: str, slow: str, rate_limits: str) -> None:
    """Train, and print when the training job has a checkpoint and when it is done.

    With ``rate_limits`` ``none``, the script ends once there is a checkpoint, without cleanup.
    """
    executor = FreeTrainExecutor(
        provider=EmbeddedClusterProvider(cluster),
        planner=PLANNER,
        trainings=replace(TRAININGS, heartbeat_timeout=timedelta(seconds=4)),
        rate_limits=RATE_LIMITS,
        checkpoint_dir=f"{directory}/checkpoints",
        checkpoints=CheckpointSettings(interval=timedelta(seconds=1)),
    )
    kernel = parsl.load(
        Config(executors=[executor], run_dir=f"{directory}/runinfo", strategy="none", initialize_logging=False)
    )
    with kernel if rate_limits == "good" else nullcontext():
        future = make_app(max_nodes=2).options(name="t")(epochs=10, slow=slow)
        run = RunState(executor.journal_path)
        told = False
        while not future.done():
            time.sleep(0.1)
            if not told and any(t.progress.get("checkpoint_step") for t in run.refresh().trainings.values()):
                print("checkpoint", flush=True)
                told = True
                if rate_limits == "none":
                    return
        fragments = [fragment.resumed_from for fragment in run.refresh().fragments]
        progress = run.trainings["t"].progress
        print(
            json.dumps({"metrics": future.result()["metrics"], "resumed": fragments, "progress": progress}),
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
