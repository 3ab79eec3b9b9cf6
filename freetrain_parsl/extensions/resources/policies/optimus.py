"""``optimus``: one worker or server after another, where it saves the most time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from freetrain_parsl.extensions.resources.policies.base import ResourceDecision, ResourcePolicy
from freetrain_parsl.planning.solvers.multiple_choice import fits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from freetrain_parsl.extensions.resources.demands import Combinations, ResourceProblem

__all__ = ["MarginalGainPolicy"]


class MarginalGainPolicy(ResourcePolicy):
    """Optimus' greedy rule (Peng et al., EuroSys 2018), for comparison.

    Jobs get one worker and one server each, in their order. Then the job gets another worker or server whose
    completion time falls the most per share of the resource that the addition needs most of (the dominant one). It does
    not look at utilities.
    """

    name: ClassVar[str] = "optimus"

    def allocate(self, problem: ResourceProblem) -> ResourceDecision:
        """Decide; see `ResourcePolicy.allocate`."""
        started = time.perf_counter()
        considered = {job.name: job.combinations for job in problem.jobs}
        capacity = np.array(problem.capacity)
        left = capacity.copy()
        growing: dict[str, _Growth] = {}
        for name, combinations in considered.items():
            if len(combinations) and fits(combinations.demands[0], left):  # of one worker and one server
                growing[name] = _Growth(combinations, capacity)
                left = left - combinations.demands[0]
        while True:
            steps = [(*step, name) for name, growth in growing.items() if (step := growth.best(left))]
            if not steps:
                break
            _, row, name = max(steps, key=lambda step: step[0])
            left = left - growing[name].move(row)
        chosen = {name: growth.combinations[growth.row] for name, growth in growing.items()}
        bound = sum(float(one.utilities.max(initial=0.0)) for one in considered.values())
        return ResourceDecision(chosen, considered, bound, time.perf_counter() - started)


class _Growth:
    """A job that has `row` of its combinations and may get one more worker or server."""

    def __init__(self, combinations: Combinations, capacity: npt.NDArray[np.float64]) -> None:
        self.combinations, self.row = combinations, 0
        self._capacity = capacity
        pairs = zip(combinations.workers.tolist(), combinations.servers.tolist(), strict=True)
        self._rows = {pair: row for row, pair in enumerate(pairs)}
        self._steps = list(self._next())

    def best(self, left: npt.NDArray[np.float64]) -> tuple[float, int] | None:
        """Return the gain and the row of the better addition that fits, if there is one that gains."""
        return max(((gain, row) for gain, row, needs in self._steps if fits(needs, left)), default=None)

    def move(self, row: int) -> npt.NDArray[np.float64]:
        """Go to a row; return what it needs in addition."""
        [needs] = [needs for _, to, needs in self._steps if to == row]
        self.row = row
        self._steps = list(self._next())
        return needs

    def _next(self) -> Iterator[tuple[float, int, npt.NDArray[np.float64]]]:
        """Yield gain, row and additional demand of one more worker and of one more server, if they gain."""
        here, table = self.combinations[self.row], self.combinations
        for pair in ((here.workers + 1, here.servers), (here.workers, here.servers + 1)):
            row = self._rows.get(pair)
            if row is None:
                continue
            needs = table.demands[row] - table.demands[self.row]
            saved = here.seconds - float(table.seconds[row])
            with np.errstate(divide="ignore", invalid="ignore"):
                share = float(np.nanmax(needs / self._capacity, initial=0.0))
            if saved > 0:
                yield saved / share if share else np.inf, row, needs
