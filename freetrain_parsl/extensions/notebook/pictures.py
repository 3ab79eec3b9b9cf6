"""The pictures of a run: its nodes over time, and its curves."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.extensions.notebook.values import Picture
from freetrain_parsl.extensions.pages.node_states import NodeState
from freetrain_parsl.places import node_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from freetrain_parsl.extensions.pages.run_view import RunView

__all__ = ["curves_picture", "stays_of", "timeline_picture"]

_MOST_NODES = 64  # rows of a picture, unless we had more
_OTHERS = "job of others, or down; nodes that were never idle are not known"
_NO_MATPLOTLIB = "for a picture: pip install 'freetrain-parsl[report]'"


def curves_picture(seen: Mapping[str, Any], title: str) -> Picture:
    """Draw loss and metrics of a view against steps; without matplotlib, only describe them."""
    curves = seen["curves"]
    if not curves:
        return Picture(f"{title}: no loss and no metric yet")
    text = f"{title}: {', '.join(dict.fromkeys(curve['name'] for curve in curves))} against steps"
    try:
        from freetrain_parsl.report.curves import draw_curves

        return _drawn(text, lambda path: draw_curves(curves, seen["trainings"]["name"], path, title=title))
    except ImportError:
        return Picture(f"{text}; {_NO_MATPLOTLIB}")


def timeline_picture(run: RunView, title: str) -> Picture:
    """Draw a run; without matplotlib, only describe it."""
    stays, state = stays_of(run.since()), run.state
    problem = f"; {run.problem}" if run.problem else ""
    if not stays:
        return Picture(f"{title}: no node has been used yet{problem}")
    used = {node_of(unit) for each in state.fragments for unit in each.nodes}
    text = f"{title}: {len(state.fragments)} fragments on {len(used)} nodes{problem}"
    try:
        from freetrain_parsl.report.timeline import draw_timeline

        return _drawn(text, lambda path: draw_timeline(state, stays, path, title=title, others=_OTHERS))
    except ImportError:
        return Picture(f"{text}; {_NO_MATPLOTLIB}")


def _drawn(text: str, draw: Callable[[Path], object]) -> Picture:
    with tempfile.TemporaryDirectory(prefix="freetrain-") as directory:
        path = Path(directory) / "picture.png"
        draw(path)
        return Picture(text, path.read_bytes())


def stays_of(seen: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return how long nodes were in blocks of ours and in jobs of others, as `draw_timeline` takes it.

    Of many nodes that we never had, the last ones are left out.
    """
    names, spans = seen.get("nodes", {}).get("name", []), seen.get("spans", {})
    origin = seen["run"]["origin"]
    kinds = {NodeState.OURS: "preemptible", NodeState.OTHERS: "main"}
    stays = [
        {
            "node": names[node],
            "kind": kinds[NodeState(state)],
            "start": origin + begin,
            "end": origin + (seen["run"]["now"] if end is None else end),
        }
        for node, state, begin, end in zip(
            *(spans.get(key, []) for key in ("node", "state", "begin", "end")), strict=True
        )
        if state in kinds
    ]
    ours = {stay["node"] for stay in stays if stay["kind"] == "preemptible"}
    others = sorted({stay["node"] for stay in stays} - ours)
    shown = ours | set(others[: max(0, _MOST_NODES - len(ours))])
    return [stay for stay in stays if stay["node"] in shown] if ours else []
