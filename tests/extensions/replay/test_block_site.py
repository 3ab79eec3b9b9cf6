"""Replays in which idle nodes must be requested as blocks, as in the executor."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.extensions.replay.block_site import BlockSettings
from freetrain_parsl.extensions.replay.simulation import Knowledge, Outcome, ReplaySettings, replay
from freetrain_parsl.planning.policies import MilpPolicy
from freetrain_parsl.planning.settings import PlannerSettings
from tests.extensions.replay.small_logs import SmallLog
from tests.extensions.replay.test_simulation import best_rates, trainer

RATE = 10.0  # samples per second of the trainer on each node


def run(
    *holes: tuple[str, float, float], knowledge: Knowledge = Knowledge.NONE, start_delay: float = 0.0, **planner: Any
) -> Outcome:
    values = {key: timedelta(seconds=value) if isinstance(value, float) else value for key, value in planner.items()}
    blocks = BlockSettings(PlannerSettings(**values), start_delay=timedelta(seconds=start_delay))
    return replay(
        SmallLog(holes, end=max(end for _, _, end in holes) + 1),
        best_rates(trainer(most=64)),
        MilpPolicy("throughput"),
        ReplaySettings(knowledge=knowledge, blocks=blocks),
    )


def trained(outcome: Outcome) -> float:
    """Return the node-seconds of training."""
    return outcome.value / RATE


def test_a_block_trains_once_its_slots_are_ready_until_its_node_is_used_again() -> None:
    outcome = run(("a", 0.0, 1000.0), startup=30.0)
    assert (trained(outcome), outcome.blocks, outcome.preempted_blocks) == (970.0, 1, 1)


def test_a_scheduler_cycle_delays_the_start() -> None:
    assert trained(run(("a", 0.0, 1000.0), startup=30.0, start_delay=60.0)) == 910.0


def test_windows_are_seen_at_the_next_poll() -> None:
    assert trained(run(("b", 0.0, 1.0), ("a", 7.0, 1007.0), startup=30.0)) == pytest.approx(1000 - 8 - 30)


def test_no_block_is_requested_in_a_hole_that_is_known_to_be_too_short() -> None:
    short = ("a", 0.0, 95.0)
    assert run(short, knowledge=Knowledge.PERFECT).blocks == 0
    assert run(short).blocks == 1


def test_a_block_whose_walltime_is_over_is_left_before_and_followed_by_another() -> None:
    outcome = run(("a", 0.0, 1000.0), startup=10.0, closing_margin=5.0, max_walltime=200.0, min_useful=20.0)
    assert outcome.preempted_blocks == 1
    assert 5 <= outcome.blocks <= 6
    assert 1000 - outcome.blocks * (10 + 5 + 15) <= trained(outcome) <= 1000 - outcome.blocks * 10


def test_a_preempted_block_takes_all_its_nodes_with_it() -> None:
    holes = (("a", 0.0, 500.0), ("b", 0.0, 1000.0))
    together = run(*holes, startup=30.0)
    apart = run(*holes, startup=30.0, max_nodes_per_block=1)
    assert trained(apart) == 470 + 970
    assert trained(together) == pytest.approx(470 + 470 + (500 - 30 - 10))  # the next poll is at 510
    assert (together.preempted_blocks, apart.preempted_blocks) == (2, 2)


def test_blocks_that_are_not_needed_are_released() -> None:
    small = trainer(most=1)
    outcome = replay(
        SmallLog([("a", 0.0, 400.0), ("b", 0.0, 400.0)]),
        best_rates(small),
        MilpPolicy("throughput"),
        ReplaySettings(blocks=BlockSettings(PlannerSettings(startup=timedelta(seconds=30)))),
    )
    assert (outcome.blocks, outcome.value) == (1, 3700.0)


def test_blocks_without_delays_make_no_difference() -> None:
    rng = random.Random(3)
    for _ in range(10):
        holes = []
        for node in "abcd":
            time = 0
            for _ in range(8):
                begin, time = time + rng.randint(1, 40), time + rng.randint(41, 200)
                holes.append((node, float(begin), float(time)))
        log = SmallLog(holes, end=2000.0)
        blocks = BlockSettings(
            PlannerSettings(
                **dict.fromkeys(("startup", "min_useful", "closing_margin", "settle", "idle_timeout"), timedelta(0)),
                max_walltime=timedelta(hours=10),
                max_nodes_per_block=1,
            ),
            poll_interval=timedelta(seconds=1),
        )
        outcomes = [
            replay(log, best_rates(trainer(most=4)), MilpPolicy("throughput"), ReplaySettings(blocks=settings))
            for settings in (None, blocks)
        ]
        assert outcomes[0].value == pytest.approx(outcomes[1].value)
        assert outcomes[1].blocks == outcomes[1].preempted_blocks == len(holes)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidSettings, match="poll_interval"):
        BlockSettings(poll_interval=timedelta(0))
