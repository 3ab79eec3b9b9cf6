"""Read by Parsl's test suite as its ``--config``; see test_parsl_suite.py."""

from datetime import timedelta

from parsl.config import Config

from freetrain_parsl import EmbeddedClusterProvider, FreeTrainExecutor, PlannerSettings, RateLimits, TrainingSettings


def fresh_config() -> Config:
    """Return a configuration with two nodes and no other jobs."""
    executor = FreeTrainExecutor(
        provider=EmbeddedClusterProvider(nodes=2),
        planner=PlannerSettings(
            startup=timedelta(seconds=5),
            min_useful=timedelta(seconds=2),
            closing_margin=timedelta(seconds=2),
            settle=timedelta(seconds=1),
        ),
        trainings=TrainingSettings(threads_per_slot=1),
        rate_limits=RateLimits(poll_interval=timedelta(seconds=0.5)),
    )
    return Config(executors=[executor], strategy="none")
