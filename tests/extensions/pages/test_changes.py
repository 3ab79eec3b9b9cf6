"""Tables of which a reader gets the changes: whatever it had, it ends with the same rows as one that reads all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.extensions.pages.changes import CurvePoints, Rows


class Reader:
    """Applies changes as ``pages/web/parts.js`` does."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, object]] = {}
        self.points: dict[tuple[int, str], list[tuple[int, float]]] = {}

    def apply_rows(self, change) -> None:
        if change is None:
            return
        columns = {name: values for name, values in change.items() if name not in ("row", "first")}
        for place, row in enumerate(change["row"]):
            self.rows[row] = {name: values[place] for name, values in columns.items()}
        self.rows = {row: content for row, content in self.rows.items() if row >= change["first"]}

    def apply_curves(self, changes) -> None:
        for change in changes:
            known = self.points.get((change["training"], change["name"]), [])[: change["from"]]
            new = list(zip(change["step"], change["value"], strict=True))
            self.points[change["training"], change["name"]] = known + new


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 9)),
        st.tuples(st.just("change"), st.integers(0, 12), st.integers(0, 9)),
        st.just(("read",)),
    ),
    max_size=60,
)


@given(operations, st.sampled_from([None, 5]))
def test_reading_now_and_then_gives_the_same_rows_as_reading_everything(steps, most):
    version = 0
    rows = Rows(["number"], lambda: version, most)
    reader, read = Reader(), 0
    for step in steps:
        version += 1
        match step:
            case ("add", number):
                rows.add(number)
            case ("change", row, number):
                rows.change(row, number=number)
            case ("read",):
                reader.apply_rows(rows.since(read))
                read = version
    reader.apply_rows(rows.since(read))
    late = Reader()
    late.apply_rows(rows.since(0))
    assert reader.rows == late.rows
    assert most is None or len(late.rows) <= most


@given(st.lists(st.one_of(st.integers(-4, 3), st.none()), max_size=80))
def test_curves_read_now_and_then_are_those_read_at_once(steps):
    version = step = 0
    curves = CurvePoints(lambda: version, most=8)
    reader, read = Reader(), 0
    for move in steps:
        version += 1
        if move is None:
            reader.apply_curves(curves.since(read))
            read = version
        else:  # back: a training job resumed from a checkpoint
            step = max(0, step + move)
            curves.add(0, "loss", step, float(version))
    reader.apply_curves(curves.since(read))
    late = Reader()
    late.apply_curves(curves.since(0))
    assert reader.points == late.points
    for points in late.points.values():
        assert [at for at, _ in points] == sorted({at for at, _ in points})
        assert len(points) <= 9


def test_a_change_to_the_same_value_is_none():
    version = 1
    rows = Rows(["state"], lambda: version)
    rows.add("waiting")
    version = 2
    rows.change(0, state="waiting")
    assert rows.since(1) is None


def test_values_that_json_has_not_are_left_out():
    curves = CurvePoints(lambda: 1)
    curves.add(0, "loss", 1, float("nan"))
    assert curves.since(0) == []
