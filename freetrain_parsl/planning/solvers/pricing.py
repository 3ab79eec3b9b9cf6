"""The best nodes for one trainer at given prices for the nodes of each class: an exact dynamic programme.

Classes are visited in order of closing, latest first: the nodes taken so far are then those alive before the closing
of the class, and the yield of an interval depends only on their number s. A step over a class takes the maximum over a
sliding window of s, for all trainers at once, as rows of arrays. Layers separate the choices in which no class has
grown, some class has grown, and a block with a start-up is opened.

Until that block has started, only the held nodes are alive, and s does not determine how many of the nodes these are.
There the rate is replaced by a tangent to its concave envelope, which is never below it: the result is then an upper
bound of the value. Without start-ups it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freetrain_parsl.planning.solvers.window_model import Counts, Table, WindowInstance, trainer_values

__all__ = ["Pricing"]

_KEPT, _GROWN, _OPENED = _LAYERS = range(3)
Layers = list[Table | None]  # value of every s, shape (R, S), in each layer; None if the layer is empty


@dataclass(frozen=True)
class _Group:
    """Classes that close together.

    Parameters
    ----------
    classes
        Their indices.
    share
        Weight of the cost of the closing.
    started
        Whether blocks opened now have started by then.
    early, late
        Seconds from the closing before to this one, before and after the end of a start-up.
    """

    classes: list[int]
    share: float
    started: bool
    early: float
    late: float


@dataclass(frozen=True)
class _Move:
    """A transition between layers by taking low to high nodes of a class, for some or all rows."""

    source: int
    target: int
    rows: Counts | None  # None: all
    low: Counts
    high: Counts

    def apply(self, values: Table) -> Table:
        """Return max over low <= n <= high of values[:, s - n], for every s; minus infinity if the range is empty."""
        if self.rows is not None:
            best = np.full(values.shape, -np.inf)
            best[self.rows] = _slide(values[self.rows], self.low, self.high)
            return best
        if len(self.low) and np.all(self.low == self.low[0]) and np.all(self.high == self.high[0]):
            return _slide_alike(values, int(self.low[0]), int(self.high[0]))
        return _slide(values, self.low, self.high)


@dataclass(frozen=True)
class _Step:
    """What is needed to trace a choice back over one class."""

    index: int
    moves: list[_Move]
    before: Layers  # of choices that already have nodes of this group
    paid: Layers  # the best of all choices, plus the price of s nodes
    prices: Table


class Pricing:
    """Best responses of the trainers of a problem to prices."""

    def __init__(self, instance: WindowInstance) -> None:
        self._instance = instance
        top = min(int(np.flatnonzero(instance.allowed.any(axis=0))[-1]), int(instance.capacities.sum()))
        self._nodes = np.arange(top + 1)
        self._earned = np.ascontiguousarray(instance.earned[:, : top + 1])
        self._allowed = instance.allowed[:, : top + 1]
        self._leaving = (instance.down + instance.checkpoint)[:, None]
        self._slow = instance.is_offered & (instance.startup > 0)
        self._start_seconds = np.where(instance.totals == 0, instance.start, 0.0)[:, None]
        self._status_quo = trainer_values(instance, np.arange(len(instance.rates)), instance.current)
        self._groups = self._group()
        if self._slow.any():
            lines = [_touching(row) for row in self._earned]
            self._bases, self._slopes = np.stack([b for b, _ in lines]), np.stack([s for _, s in lines])

    def respond(
        self, rows: Counts, prices: Table, capacities: Counts, touch: Counts | None = None
    ) -> tuple[Table, Counts]:
        """Find the choices with the largest value less the price of their nodes.

        Parameters
        ----------
        rows
            PlannedJob of each choice, shape (R,).
        prices
            Price of a node of each class, shape (R, K).
        capacities
            Maximum number of nodes of each class, shape (R, K).
        touch
            Numbers of held nodes at which tangents touch, shape (R,): the closer to those of the best choice, the
            tighter the bound with start-ups. ``None``: the trainers' current numbers.

        Returns
        -------
        tuple
            The value less the price, or an upper bound of it, shape (R,), and the choices, shape (R, K).
        """
        instance = self._instance
        every = np.arange(len(rows))
        if self._slow.any():
            at = np.minimum(instance.totals[rows] if touch is None else touch, self._nodes[-1])
            self._base, self._slope = self._bases[rows, at][:, None], self._slopes[rows, at][:, None]
        layers, steps, closed = self._forward(rows, prices, np.minimum(capacities, self._nodes[-1]))
        best = np.full(len(rows), -np.inf)
        at, layer = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
        for index, values in enumerate(layers):
            if values is None:
                continue
            change = instance.down if index == _KEPT else instance.up
            last = values - (change * instance.before)[rows, None]
            if instance.moved is not None:
                last -= instance.moved[rows, : len(self._nodes)] * instance.before[rows, None]
            last -= self._start_seconds[rows] * self._earned[rows]
            last[~self._allowed[rows]] = -np.inf
            peak = last.argmax(axis=1)
            better = last[every, peak] > best
            best[better], at[better], layer[better] = last[every, peak][better], peak[better], index
        choices = self._back(steps, closed, at, layer)

        current = instance.current[rows]
        stay = self._status_quo[rows] - (prices * current).sum(axis=1)
        stay[np.any(current > capacities, axis=1)] = -np.inf
        stays = stay >= best
        choices[stays] = current[stays]
        return np.maximum(best, stay), choices

    def _group(self) -> list[_Group]:
        """Group the classes by closing, latest first."""
        instance = self._instance
        times = np.unique(instance.ends)[::-1].tolist()
        groups = []
        for end, until in zip(times, [*times[1:], 0.0], strict=True):
            early = max(min(instance.startup, end) - until, 0.0)
            shares = np.unique(instance.counted[instance.ends == end]).tolist()
            for share in shares:
                same = (instance.ends == end) & (instance.counted == share) & (instance.capacities > 0)
                first = share == shares[-1]  # of those to close: the time before is its
                lasts = (early, end - until - early) if first else (0.0, 0.0)
                groups.append(_Group(np.flatnonzero(same).tolist(), share, end > instance.startup, *lasts))
        return groups

    def _forward(self, rows: Counts, prices: Table, capacities: Counts) -> tuple[Layers, list[_Step], list[Layers]]:
        """Visit the classes; return the values of every s at the end, and the layers of each step and each group."""
        earned = self._earned[rows]
        penalty = self._leaving[rows] * earned
        first = np.full(earned.shape, -np.inf)
        first[:, 0] = 0.0
        # If growing costs no less than shrinking, treating a choice as grown never overestimates its value.
        stay: Layers = [first, first.copy() if self._instance.growing_costs_more else None, None]
        steps: list[_Step] = []
        closed: list[Layers] = []
        for group in self._groups:
            moved: Layers = [None, None, None]
            for index in group.classes:
                price = self._price(prices, index)
                pay = price * self._nodes
                paid = [None if (s := _best(a, b)) is None else s + pay for a, b in zip(stay, moved, strict=True)]
                step = _Step(index, self._moves(rows, index, capacities[:, index]), moved, paid, price)
                moved = list(moved)
                for move in step.moves:
                    if (source := paid[move.source]) is not None:
                        moved[move.target] = _best(moved[move.target], move.apply(source) - pay)
                steps.append(step)
            left: Layers = [m if m is None or not group.share else m - group.share * penalty for m in moved]
            gain = (group.early + group.late) * earned
            ahead = [None if (a := _best(s, m)) is None else a + gain for s, m in zip(stay, left, strict=True)]
            if (group.early > 0 or not group.started) and (stay[_OPENED] is not None or moved[_OPENED] is not None):
                left[_OPENED], ahead[_OPENED] = self._before_start(rows, group, stay[_OPENED], moved[_OPENED])
            closed.append([*stay, *left])
            stay = ahead
        return stay, steps, closed

    def _before_start(
        self, rows: Counts, group: _Group, stay: Table | None, moved: Table | None
    ) -> tuple[Table | None, Table | None]:
        """Pass a closing and the interval before it, part or all of which is before the opened blocks start."""
        # Only held nodes leave before the end of the start-up, and s does not determine how many there were, if any.
        if moved is not None and group.share and group.started:
            moved = moved - group.share * self._leaving[rows] * self._earned[rows]
        ahead = _best(stay, moved)
        tangent = self._base + self._slope * self._nodes
        return moved, None if ahead is None else ahead + group.late * self._earned[rows] + group.early * tangent

    def _moves(self, rows: Counts, index: int, most: Counts) -> list[_Move]:
        one = np.ones_like(most)
        if self._slow[index]:
            return [_Move(layer, _OPENED, None, one, most) for layer in _LAYERS]
        have = self._instance.current[rows, index]
        moves = [_Move(_GROWN, _GROWN, None, one, most)]
        if not self._instance.growing_costs_more:
            moves.append(_Move(_KEPT, _GROWN, None, have + 1, most))
        if have.any():
            some = np.flatnonzero(have)
            moves.append(_Move(_KEPT, _KEPT, some, one[some], np.minimum(have, most)[some]))
        if self._slow.any():
            moves.append(_Move(_OPENED, _OPENED, None, one, most))
        return moves

    def _price(self, prices: Table, index: int) -> Table:
        """Return the price of a node, plus the tangent's share while it is not available yet."""
        price = prices[:, index, None]
        if self._slow[index]:
            price = price + min(self._instance.startup, self._instance.horizon) * self._slope
        return price

    def _back(self, steps: list[_Step], closed: list[Layers], at: Counts, layer: Counts) -> Counts:
        """Trace the choices that end on `at` nodes in `layer`."""
        choices = np.zeros((len(at), len(self._instance.sizes)), dtype=np.int64)
        at, layer, left = at.copy(), layer.copy(), len(steps)
        every = np.arange(len(at))
        for group, seen in zip(reversed(self._groups), reversed(closed), strict=True):
            moved = _at(seen[3:], layer, every, at) > _at(seen[:3], layer, every, at)
            for _ in group.classes:
                left -= 1
                step = steps[left]
                for target in _LAYERS:
                    mine = np.flatnonzero(moved & (layer == target))
                    if len(mine):
                        count, source = _taken(step, target, mine, at[mine])
                        choices[mine, step.index] = count
                        at[mine] -= count
                        layer[mine] = source
                        came = _at(step.before, source, mine, at[mine])
                        # After a class with nodes, the path continues through the better of the two.
                        moved[mine] = (count == 0) | (came >= _at(seen[:3], source, mine, at[mine]))
        return choices


def _taken(step: _Step, target: int, rows: Counts, at: Counts) -> tuple[Counts, Counts]:
    """Return how many nodes of a class a choice at `at` after the step has, and its layer before the step."""
    count, source = np.zeros(len(rows), dtype=np.int64), np.full(len(rows), target)
    before = step.before[target]
    pay = step.prices[rows, 0] * at
    best = np.full(len(rows), -np.inf) if before is None else before[rows, at]
    for move in step.moves:
        values = step.paid[move.source]
        if move.target != target or values is None:
            continue
        place = np.arange(len(rows)) if move.rows is None else np.flatnonzero(np.isin(rows, move.rows))
        if not len(place):
            continue
        which = rows[place]
        mine = which if move.rows is None else np.searchsorted(move.rows, which)
        low, high = move.low[mine], np.minimum(move.high[mine], at[place])
        offers = np.arange(int(low.min()), int(high.max()) + 1)
        if not len(offers):
            continue
        inside = (offers >= low[:, None]) & (offers <= high[:, None])
        left = np.maximum(at[place, None] - offers, 0)
        seen = np.where(inside, values[which[:, None], left], -np.inf)
        peak = seen.argmax(axis=1)
        value = seen[np.arange(len(place)), peak] - pay[place]
        better = value > best[place]
        place, peak = place[better], peak[better]
        best[place], count[place], source[place] = value[better], offers[peak], move.source
    return count, source


def _best(first: Table | None, second: Table | None) -> Table | None:
    if first is None or second is None:
        return second if first is None else first
    best: Table = np.maximum(first, second)
    return best


def _at(layers: Layers, layer: Counts, rows: Counts, at: Counts) -> Table:
    """Look up one value of each row, in its layer."""
    values = np.full(len(rows), -np.inf)
    for index, table in enumerate(layers):
        if table is not None:
            mine = layer == index
            values[mine] = table[rows[mine], at[mine]]
    return values


def _slide_alike(values: Table, low: int, high: int) -> Table:
    """Slide one window over all rows, from maxima over 1, 2, 4, ... neighbours, of which two cover the window."""
    rows, size = values.shape
    if high < low:
        return np.full(values.shape, -np.inf)
    doubled = np.full((rows, size + high), -np.inf)
    doubled[:, high:] = values
    width, known = high - low + 1, 1
    while 2 * known <= width:
        doubled = np.maximum(doubled[:, :-known], doubled[:, known:])
        known *= 2
    best: Table = np.maximum(doubled[:, :size], doubled[:, width - known : width - known + size])
    return best


def _slide(values: Table, low: Counts, high: Counts) -> Table:
    """Slide a separate window over each row."""
    best = np.full(values.shape, -np.inf)
    bounds = low * (int(high.max()) + 1) + high
    for bound in np.unique(bounds).tolist():
        mine = np.flatnonzero(bounds == bound)
        best[mine] = _slide_alike(values[mine], int(low[mine[0]]), int(high[mine[0]]))
    return best


def _touching(values: Table) -> tuple[Table, Table]:
    """Return offset and slope of the lines that touch the concave envelope of a function at every point."""
    corners = [0]
    while corners[-1] < len(values) - 1:
        last = corners[-1]
        slopes = (values[last + 1 :] - values[last]) / np.arange(1, len(values) - last)
        corners.append(last + 1 + int(len(slopes) - 1 - np.argmax(slopes[::-1])))
    at = np.array(corners)
    nodes = np.arange(len(values))
    if len(at) == 1:
        return np.zeros(1), np.zeros(1)
    rises = np.diff(values[at]) / np.diff(at)
    slope = rises[np.maximum(np.searchsorted(at, nodes) - 1, 0)]  # at a corner: the slope to its left
    # The line through the corner alone is not enough: rounding must not leave a value above it.
    offsets = np.array([np.max(values - rise * nodes) for rise in rises])
    return offsets[np.maximum(np.searchsorted(at, nodes) - 1, 0)], slope
