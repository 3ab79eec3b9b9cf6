"""Run by test_monitoring.py in a separate process: one training job with Parsl's monitoring enabled."""

import sys

import parsl
from parsl.config import Config
from parsl.monitoring import MonitoringHub

from freetrain_parsl import EmbeddedClusterProvider, FreeTrainExecutor
from tests.executor.scenario import PLANNER, RATE_LIMITS, TRAININGS, make_app


def main(directory: str) -> None:
    """Train on two nodes, so that Parsl's wrapper runs on each of them."""
    executor = FreeTrainExecutor(
        provider=EmbeddedClusterProvider(nodes=2, cluster_dir=f"{directory}/cluster"),
        planner=PLANNER,
        trainings=TRAININGS,
        rate_limits=RATE_LIMITS,
    )
    monitoring = MonitoringHub(logging_endpoint=f"sqlite:///{directory}/monitoring.db")
    with parsl.load(
        Config(executors=[executor], run_dir=f"{directory}/runinfo", strategy="none", monitoring=monitoring)
    ):
        make_app(max_nodes=2, min_nodes=2)(epochs=2).result()


if __name__ == "__main__":
    main(*sys.argv[1:])
