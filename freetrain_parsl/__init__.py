"""FreeTrain for Parsl: train neural networks in the nodes that a supercomputer leaves idle."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from freetrain_parsl._version import __version__

if TYPE_CHECKING:
    from freetrain_parsl.app import TrainingApp, training_app
    from freetrain_parsl.cluster.client import EmbeddedCluster
    from freetrain_parsl.cluster.provider import EmbeddedClusterProvider
    from freetrain_parsl.errors import (
        BatchSystemError,
        CannotFuse,
        CheckpointError,
        CheckpointMismatch,
        ClusterGone,
        CodeChanged,
        CollectionUnavailable,
        CommandNotFound,
        DamagedCheckpoint,
        DriverSuperseded,
        ForeignCheckpoint,
        FreeTrainError,
        GlobusRefused,
        InvalidApp,
        InvalidInput,
        InvalidSettings,
        NonFiniteLoss,
        PlanningError,
        RemoteError,
        ReplicasDiffer,
        StorageUnavailable,
        TooManyRestarts,
        TrainingCancelled,
        TrainingError,
        TrainingInterrupted,
        UnreadableAnswer,
        UsageError,
    )
    from freetrain_parsl.executor.executor import FreeTrainExecutor
    from freetrain_parsl.executor.htex.launch import Container
    from freetrain_parsl.executor.journal import read_journal
    from freetrain_parsl.executor.node_kinds import NodeKind
    from freetrain_parsl.executor.values.tracker import Tracker
    from freetrain_parsl.planning.curves.scaling import ScalingCurve
    from freetrain_parsl.planning.model import Decision, PlannedJob, Window
    from freetrain_parsl.planning.policies.base import Policy
    from freetrain_parsl.planning.policies.baselines import EqualSharePolicy
    from freetrain_parsl.planning.policies.milp import MilpPolicy
    from freetrain_parsl.planning.policies.window import WindowPolicy
    from freetrain_parsl.planning.settings import PlannerSettings, RescaleCosts
    from freetrain_parsl.report.futures import explain
    from freetrain_parsl.settings import CheckpointSettings, RateLimits, TrainingSettings
    from freetrain_parsl.training.data.loader_options import LoaderOptions
    from freetrain_parsl.training.fragment import run_local
    from freetrain_parsl.training.session import TrainingSession
    from freetrain_parsl.windows.base import WindowSource

__all__ = [
    "BatchSystemError",
    "CannotFuse",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointSettings",
    "ClusterGone",
    "CodeChanged",
    "CollectionUnavailable",
    "CommandNotFound",
    "Container",
    "DamagedCheckpoint",
    "Decision",
    "DriverSuperseded",
    "EmbeddedCluster",
    "EmbeddedClusterProvider",
    "EqualSharePolicy",
    "ForeignCheckpoint",
    "FreeTrainError",
    "FreeTrainExecutor",
    "GlobusRefused",
    "InvalidApp",
    "InvalidInput",
    "InvalidSettings",
    "LoaderOptions",
    "MilpPolicy",
    "NodeKind",
    "NonFiniteLoss",
    "PlannedJob",
    "PlannerSettings",
    "PlanningError",
    "Policy",
    "RateLimits",
    "RemoteError",
    "ReplicasDiffer",
    "RescaleCosts",
    "ScalingCurve",
    "StorageUnavailable",
    "TooManyRestarts",
    "Tracker",
    "TrainingApp",
    "TrainingCancelled",
    "TrainingError",
    "TrainingInterrupted",
    "TrainingSession",
    "TrainingSettings",
    "UnreadableAnswer",
    "UsageError",
    "Window",
    "WindowPolicy",
    "WindowSource",
    "__version__",
    "explain",
    "read_journal",
    "run_local",
    "training_app",
]

# Where each public name lives: loaded when first used, so that importing this package loads neither torch nor HiGHS.
_HOMES = {
    "CheckpointSettings": "freetrain_parsl.settings",
    "Container": "freetrain_parsl.executor.htex.launch",
    "Decision": "freetrain_parsl.planning.model",
    "EmbeddedCluster": "freetrain_parsl.cluster.client",
    "EmbeddedClusterProvider": "freetrain_parsl.cluster.provider",
    "EqualSharePolicy": "freetrain_parsl.planning.policies.baselines",
    "FreeTrainExecutor": "freetrain_parsl.executor.executor",
    "LoaderOptions": "freetrain_parsl.training.data.loader_options",
    "RateLimits": "freetrain_parsl.settings",
    "MilpPolicy": "freetrain_parsl.planning.policies.milp",
    "NodeKind": "freetrain_parsl.executor.node_kinds",
    "PlannerSettings": "freetrain_parsl.planning.settings",
    "Policy": "freetrain_parsl.planning.policies.base",
    "RescaleCosts": "freetrain_parsl.planning.settings",
    "ScalingCurve": "freetrain_parsl.planning.curves.scaling",
    "PlannedJob": "freetrain_parsl.planning.model",
    "Tracker": "freetrain_parsl.executor.values.tracker",
    "TrainingApp": "freetrain_parsl.app",
    "TrainingSession": "freetrain_parsl.training.session",
    "TrainingSettings": "freetrain_parsl.settings",
    "Window": "freetrain_parsl.planning.model",
    "WindowSource": "freetrain_parsl.windows.base",
    "WindowPolicy": "freetrain_parsl.planning.policies.window",
    "explain": "freetrain_parsl.report.futures",
    "read_journal": "freetrain_parsl.executor.journal",
    "run_local": "freetrain_parsl.training.fragment",
    "training_app": "freetrain_parsl.app",
}
_HOMES |= dict.fromkeys(set(__all__) - _HOMES.keys() - {"__version__"}, "freetrain_parsl.errors")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
