"""Settings that the executor's constructor rejects, before anything is started."""

from __future__ import annotations

import inspect
import re
from datetime import timedelta

import pytest
from parsl.providers import LocalProvider

from freetrain_parsl import (
    CheckpointSettings,
    EmbeddedClusterProvider,
    FreeTrainExecutor,
    PlannerSettings,
    RateLimits,
    RescaleCosts,
    TrainingSettings,
)
from freetrain_parsl.errors import CheckpointError, FreeTrainError, InvalidSettings
from freetrain_parsl.extensions.goodput.baselines import OptimusPolicy
from freetrain_parsl.planning.policies import POLICIES


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (FreeTrainExecutor, {"provider": 3}, "FreeTrainExecutor: provider must be ExecutionProvider | None, got 3"),
        (FreeTrainExecutor, {"slots_per_node": "2"}, "FreeTrainExecutor: slots_per_node must be int, got '2'"),
        (
            FreeTrainExecutor,
            {"grace": 5},
            "FreeTrainExecutor: grace must be a timedelta, got 5; in seconds: timedelta(seconds=5)",
        ),
        (
            FreeTrainExecutor,
            {"available_accelerators": [1]},
            "FreeTrainExecutor: available_accelerators must be int | list[str], got [1]",
        ),
        (EmbeddedClusterProvider, {"nodes": 2.5}, "EmbeddedClusterProvider: nodes must be int, got 2.5"),
    ],
)
def test_a_setting_of_a_wrong_type_is_refused_in_one_line(kind: type, settings: dict, message: str) -> None:
    """Typeguard's own text has a line for each alternative of the annotation."""
    with pytest.raises(InvalidSettings) as caught:
        kind(**settings)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"slots_per_node": 0}, "FreeTrainExecutor: slots_per_node must be a whole number of at least 1, got 0"),
        ({"grace": timedelta(0)}, "FreeTrainExecutor: grace must be longer than zero, got 0 s"),
        ({"label": "a b"}, "FreeTrainExecutor: label 'a b' may hold letters, digits, '.', '_' and '-' only"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_line(settings: dict, message: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        FreeTrainExecutor(provider=EmbeddedClusterProvider(), **settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (TrainingSettings, {"rescale_costs": 2.0}, "rescale_costs must be RescaleCosts(up, down, start), got 2.0"),
        (RescaleCosts, {"up": 2.0}, "up must be a timedelta, got 2.0; in seconds: timedelta(seconds=2.0)"),
        (RescaleCosts, {"start": timedelta(seconds=-1)}, "start must be at least 0 s, got -1 s"),
        (TrainingSettings, {"heartbeat_timeout": timedelta(0)}, "heartbeat_timeout must be longer than zero, got 0 s"),
        (
            TrainingSettings,
            {"peer_timeout": 5},
            "peer_timeout must be a timedelta, got 5; in seconds: timedelta(seconds=5)",
        ),
        (TrainingSettings, {"max_restarts": -1}, "max_restarts must be a whole number of at least 0, got -1"),
        (TrainingSettings, {"threads_per_slot": 0}, "threads_per_slot must be a whole number of at least 1, got 0"),
        (RateLimits, {"poll_interval": timedelta(seconds=-1)}, "poll_interval must be longer than zero, got -1 s"),
        (
            RateLimits,
            {"submissions_per_minute": 0},
            "submissions_per_minute must be a whole number of at least 1, got 0",
        ),
        (RateLimits, {"max_refusals": True}, "max_refusals must be a whole number of at least 1, got True"),
        (RateLimits, {"max_failed_blocks": 0}, "max_failed_blocks must be a whole number of at least 1, got 0"),
        (CheckpointSettings, {"interval": timedelta(0)}, "interval must be longer than zero, got 0 s"),
        (CheckpointSettings, {"save_margin": timedelta(seconds=-1)}, "save_margin must be at least 0 s, got -1 s"),
        (CheckpointSettings, {"keep": 0}, "keep must be a whole number of at least 1, got 0"),
    ],
)
def test_grouped_settings_out_of_range_are_refused_in_one_line(kind: type, settings: dict, message: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        kind(**settings)
    assert str(caught.value) == f"{kind.__name__}: {message}"


def test_groups_have_defaults() -> None:
    executor = FreeTrainExecutor(provider=EmbeddedClusterProvider())
    assert (executor.planner, executor.trainings) == (PlannerSettings(), TrainingSettings())
    assert (executor.rate_limits, executor.checkpoints) == (RateLimits(), CheckpointSettings())


def test_the_documentation_of_the_executor_lists_its_policies() -> None:
    text = inspect.getdoc(FreeTrainExecutor).split("\npolicy\n")[1].split("\nplanner\n")[0]
    offered = {name for name, policy in POLICIES.items() if not policy.any_layout}
    assert set(re.findall(r"^ +``([\w-]+)``$", text, re.MULTILINE)) == offered


def test_a_policy_that_spreads_jobs_over_parts_of_nodes_is_refused() -> None:
    for policy in ("ones-published", "optimus", "tiresias", OptimusPolicy()):
        with pytest.raises(InvalidSettings, match=r"^policy '[\w-]+' spreads jobs .*; here use 'milp'$"):
            FreeTrainExecutor(provider=EmbeddedClusterProvider(), policy=policy)


def test_a_checkpoint_directory_that_cannot_be_written_is_refused_at_construction(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises((CheckpointError, InvalidSettings)) as caught:
        FreeTrainExecutor(provider=EmbeddedClusterProvider(), checkpoint_dir=tmp_path / "file")
    assert str(tmp_path / "file") in str(caught.value)


def test_a_provider_that_cannot_be_asked_for_windows_is_refused_by_name() -> None:
    with pytest.raises(FreeTrainError, match="cannot query LocalProvider for windows"):
        FreeTrainExecutor(provider=LocalProvider())


def test_the_representation_names_every_setting() -> None:
    executor = FreeTrainExecutor(label="holes", provider=EmbeddedClusterProvider(nodes=3))
    assert "label='holes'" in repr(executor)
    assert "nodes=3" in repr(executor)


def test_parsls_strategies_and_pollers_leave_it_alone() -> None:
    executor = FreeTrainExecutor(provider=EmbeddedClusterProvider())
    assert executor.status_polling_interval == 0
    assert executor.scale_out_facade(3) == []
    assert executor.scale_in_facade(3) == []
