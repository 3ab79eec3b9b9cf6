"""Objectives: the value of an allocation."""

from __future__ import annotations

from freetrain_parsl.extensions.goodput.completion_time import CompletionTime
from freetrain_parsl.extensions.goodput.completion_utility import CompletionUtility
from freetrain_parsl.planning.objectives.base import register_objective

register_objective("completion-time", CompletionTime())
register_objective("completion-utility", CompletionUtility())
