"""Each sample exactly once per epoch, on any number of members; each member's part of a batch has its weight."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.training.data.order import Batch, Order

SETTINGS = {
    "length": st.integers(1, 60),
    "batch_size": st.integers(1, 20),
    "seed": st.integers(0, 5),
    "shuffle": st.booleans(),
    "drop_last": st.booleans(),
    "micro_batch": st.none() | st.integers(1, 5),
    "least": st.integers(1, 2),
}
ORDERS = st.builds(Order, **SETTINGS, scaled=st.booleans())
SHARDED = st.builds(Order, **SETTINGS, shards=st.integers(1, 9))
SIZES = st.integers(1, 9)


def batches(order: Order, epoch: int, sizes: list[int]) -> list[list[Batch]]:
    """Return all members' views of all batches of an epoch, while the number of members cycles through `sizes`."""
    positions, begin, views = order.epoch(epoch), 0, []
    while begin < len(positions):
        size = sizes[len(views) % len(sizes)]
        views.append([order.batch(positions, begin, rank, size) for rank in range(size)])
        begin += views[-1][0].samples
    return views


@given(order=ORDERS | SHARDED, epoch=st.integers(0, 3), sizes=st.lists(SIZES, min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_the_pieces_of_all_members_are_the_epoch_in_order(order: Order, epoch: int, sizes: list[int]) -> None:
    """However the number of members changes between batches."""
    seen: list[int] = []
    for views in batches(order, epoch, sizes):
        pieces = [piece for view in views for piece in view.pieces]
        seen += [position for piece in pieces if piece.weight for position in piece.positions.tolist()]
        assert {view.samples for view in views} == {sum(piece.weight for piece in pieces)}
    assert seen == order.epoch(epoch).tolist()
    assert len(set(seen)) == len(seen) == order.samples


@given(order=ORDERS | SHARDED, size=SIZES)
@settings(max_examples=100, deadline=None)
def test_every_member_has_pieces_and_knows_its_last_one(order: Order, size: int) -> None:
    """A member without a part in the batch has a sample of weight zero."""
    for views in batches(order, 0, [size]):
        assert views[0].pieces[0].weight
        for view in views:
            assert [piece.last for piece in view.pieces] == [False] * (len(view.pieces) - 1) + [True]
            for piece in view.pieces:
                assert piece.weight in (0, len(piece.positions))
                assert 1 <= len(piece.positions) <= max(order.micro_batch or order.length, 2 * order.least - 1)
                assert len(piece.positions) >= min(order.least, view.samples)


@given(order=ORDERS, size=SIZES)
@settings(max_examples=100, deadline=None)
def test_parts_differ_by_one_sample_at_most(order: Order, size: int) -> None:
    for views in batches(order, 0, [size]):
        parts = [sum(piece.weight for piece in view.pieces) for view in views]
        used = [part for part in parts if part or order.least == 1]
        assert max(used) - min(used) <= 1
        assert len(used) == max(1, min(size, views[0].samples // order.least)) or order.least == 1
        assert len({len(view.pieces) for view in views}) == 1, "all members take part as often"


@given(order=SHARDED, size=SIZES)
@settings(max_examples=100, deadline=None)
def test_with_fixed_shards_the_pieces_are_the_same_for_any_number_of_members(order: Order, size: int) -> None:
    def pieces(size: int) -> list[tuple[list[int], int, bool]]:
        return [
            (piece.positions.tolist(), piece.shard, piece.last_of_shard)
            for views in batches(order, 0, [size])
            for view in views
            for piece in view.pieces
            if piece.weight
        ]

    assert pieces(size) == pieces(1)


@given(order=SHARDED)
@settings(max_examples=60, deadline=None)
def test_each_shard_ends_once_and_has_samples(order: Order) -> None:
    for (batch,) in batches(order, 0, [1]):
        assert [piece.shard for piece in batch.pieces if piece.last_of_shard] == list(range(batch.shards))


@given(order=ORDERS | SHARDED)
@settings(max_examples=60, deadline=None)
def test_an_epoch_has_all_samples_unless_the_last_batch_is_dropped(order: Order) -> None:
    missing = order.length - len(order.epoch(0))
    assert missing == (order.length % order.batch_size if order.drop_last else 0)


def test_a_scaled_batch_grows_with_the_members() -> None:
    sizes = [views[0].samples for views in batches(Order(100, 10, 0, scaled=True), 0, [1, 4, 2])]
    assert sizes == [10, 40, 20, 10, 20]


def test_epochs_differ_and_repeat_with_the_seed() -> None:
    order = Order(50, 10, seed=1)
    assert order.epoch(0).tolist() != order.epoch(1).tolist()
    assert order.epoch(1).tolist() == Order(50, 10, seed=1).epoch(1).tolist()
    assert order.epoch(1).tolist() != Order(50, 10, seed=2).epoch(1).tolist()


@pytest.mark.parametrize("epoch", [0, 1])
def test_without_shuffling_an_epoch_is_the_dataset_in_order(epoch: int) -> None:
    assert Order(5, 2, seed=1, shuffle=False).epoch(epoch).tolist() == [0, 1, 2, 3, 4]
