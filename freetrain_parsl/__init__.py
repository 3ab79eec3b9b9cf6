"""FreeTrain for Parsl: train neural networks in the nodes that a supercomputer leaves idle."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from freetrain_parsl._version import __version__

if TYPE_CHECKING:
    from freetrain_parsl.app import TrainingApp, training_app
    from freetrain_parsl.cluster.client import EmbeddedCluster
    from freetrain_parsl.cluster.provider import EmbeddedClusterProvider
    from freetrain_parsl.errors import FreeTrainError
    from freetrain_parsl.executor.executor import FreeTrainExecutor
    from freetrain_parsl.planning.curves.scaling import ScalingCurve
    from freetrain_parsl.planning.model import RescaleCosts, Trainer, Window
    from freetrain_parsl.planning.settings import PlannerSettings
    from freetrain_parsl.training.session import TrainingSession

__all__ = [
    "EmbeddedCluster",
    "EmbeddedClusterProvider",
    "FreeTrainError",
    "FreeTrainExecutor",
    "PlannerSettings",
    "RescaleCosts",
    "ScalingCurve",
    "Trainer",
    "TrainingApp",
    "TrainingSession",
    "Window",
    "__version__",
    "training_app",
]

# Where each public name lives: loaded when first used, so that importing this package loads neither torch nor HiGHS.
_HOMES = {
    "EmbeddedCluster": "freetrain_parsl.cluster.client",
    "EmbeddedClusterProvider": "freetrain_parsl.cluster.provider",
    "FreeTrainError": "freetrain_parsl.errors",
    "FreeTrainExecutor": "freetrain_parsl.executor.executor",
    "PlannerSettings": "freetrain_parsl.planning.settings",
    "RescaleCosts": "freetrain_parsl.planning.model",
    "ScalingCurve": "freetrain_parsl.planning.curves.scaling",
    "Trainer": "freetrain_parsl.planning.model",
    "TrainingApp": "freetrain_parsl.app",
    "TrainingSession": "freetrain_parsl.training.session",
    "Window": "freetrain_parsl.planning.model",
    "training_app": "freetrain_parsl.app",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
