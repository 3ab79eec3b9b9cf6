"""Windows of the embedded cluster."""

from __future__ import annotations

from freetrain_parsl.cluster.batch import JobState
from freetrain_parsl.cluster.window_source import LocalWindowSource
from freetrain_parsl.planning.model import Window, WindowKind
from freetrain_parsl.windows.base import BlockState, BlockStatus, Survey


class Client:
    """Responds like a cluster, with one response per survey."""

    def __init__(self, windows=(), jobs=None):
        self.answer = {"time": 1000.0, "windows": list(windows), "jobs": jobs or {}}
        self.requests: list[list[str]] = []

    def nodes(self):
        return {f"n0{number}": {} for number in range(1, 9)}

    def survey(self, job_ids):
        self.requests.append(list(job_ids))
        return self.answer


def job(state, **values):
    return {"state": state, "nodes": [], "ends": None, "reason": "", **values}


def test_one_request_gives_windows_largest_first_and_the_blocks_asked_for():
    client = Client(
        [
            {"nodes": ["n05"], "opens": 900.0, "closes": None},
            {"nodes": ["n02", "n01"], "opens": 950.0, "closes": 1060.0},
        ],
        {"7": job("RUNNING", nodes=["n03"], ends=1100.0)},
    )
    survey = LocalWindowSource(client).survey(["7", "8"])
    assert client.requests == [["7", "8"]]
    assert survey == Survey(
        1000.0,
        (
            Window(("n01", "n02"), 950.0, 1060.0, WindowKind.BACKFILL),
            Window(("n05",), 900.0, None, WindowKind.BACKFILL),
        ),
        {"7": BlockStatus(BlockState.RUNNING, ("n03",), 1100.0), "8": BlockStatus(BlockState.UNKNOWN)},
        nodes=8,
    )


def test_every_state_of_a_job_has_one_of_a_block():
    jobs = {state.value: job(state.value, reason="why") for state in JobState}
    blocks = LocalWindowSource(Client(jobs=jobs)).survey(list(jobs)).blocks
    assert {name: block.state.name for name, block in blocks.items()} == {name: name for name in jobs}
    assert {block.reason for block in blocks.values()} == {"why"}
