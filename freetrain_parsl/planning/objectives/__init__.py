"""Objectives: the value of an allocation."""

from __future__ import annotations

from freetrain_parsl.planning.objectives.base import register_objective
from freetrain_parsl.planning.objectives.completion_time import CompletionTime
from freetrain_parsl.planning.objectives.completion_utility import CompletionUtility

register_objective("completion-time", CompletionTime())
register_objective("completion-utility", CompletionUtility())
