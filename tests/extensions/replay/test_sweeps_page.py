"""The page of sweeps: what finished, fused and one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from freetrain_parsl.extensions.fusion.curve import FusionCurve
from freetrain_parsl.extensions.replay.comparison import Contestant
from freetrain_parsl.extensions.replay.page.frame import write_page
from freetrain_parsl.extensions.replay.sweeps.arrays import FUSION_CURVES, fusion_curve
from freetrain_parsl.extensions.replay.sweeps.sweeps import compare_fusion
from freetrain_parsl.extensions.replay.trainers import TrainerSet
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import PlannedJob
from tests.extensions.replay.small_logs import SmallLog
from tests.extensions.replay.test_page import HOSTILE, Reader

if TYPE_CHECKING:
    from pathlib import Path


def result(fusion: FusionCurve, *policies: str, name: str = "mine") -> dict[str, Any]:
    members = tuple(PlannedJob(f"{name}-{i}", 1, 1, ScalingCurve({1: 10.0}), work_left=100.0) for i in range(4))
    trainers = TrainerSet(name, members, "throughput", {name: members})
    contestants = [Contestant(policy, objective="throughput") for policy in policies]
    made = compare_fusion(SmallLog([("a", 0.0, 30.0)]), trainers, (name, fusion), contestants, price_per_node_hour=9.0)
    return {**made, "command": f"freetrain replay {name}"}


def page(figures: dict[str, Any], tmp_path: Path) -> Reader:
    write_page(figures, tmp_path / "page.html")
    return Reader((tmp_path / "page.html").read_text(encoding="utf-8"))


def test_the_page_compares_both_ways(tmp_path: Path) -> None:
    read = page(result(FusionCurve([(4, 2.0)]), "milp", "equal-share"), tmp_path)
    assert "would have finished 4 of 4 members of sweeps in 30 s, fused as mine, against 3 one by one" in read.text
    for text in ("milp, fused: 4", "equal-share, one by one: 3", "All work", "Finished per node-hour"):
        assert text in read.text
    assert read.count("svg") == 2


def test_one_by_one_only(tmp_path: Path) -> None:
    read = page(result(FusionCurve(), "milp"), tmp_path)
    assert "finished 3 of 4 members of sweeps in 30 s, one by one (mine)" in read.text


def test_words_of_users_never_become_markup(tmp_path: Path) -> None:
    read = page(result(FusionCurve([(4, 2.0)]), "milp", name=HOSTILE), tmp_path)
    assert read.count("script") == read.count("img") == 0
    assert read.text.count(HOSTILE) >= 4


@pytest.mark.parametrize("name", [name for name in FUSION_CURVES if name != "none"])
def test_curves_by_name_are_worth_fusing(name: str) -> None:
    curve = fusion_curve(name)
    assert curve(curve.largest) >= 1.1
