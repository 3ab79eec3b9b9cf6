"""The sample counts, and the audit of lost and repeated samples."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.training.data.audit import Audit, Ledger, audit


@given(st.lists(st.integers(0, 9), max_size=40))
@settings(deadline=None)
def test_the_audit_equals_a_count_by_hand(positions: list[int]) -> None:
    ledger = Ledger(10)
    for begin in range(0, len(positions), 7):
        ledger.add(torch.tensor(positions[begin : begin + 7], dtype=torch.int64))
    found = audit(ledger.counts, torch.arange(10))
    assert found == Audit(
        samples_seen=len(positions),
        samples_lost=10 - len(set(positions)),
        duplicate_samples=len(positions) - len(set(positions)),
    )


def test_samples_that_an_epoch_leaves_out_on_purpose_are_not_lost() -> None:
    ledger = Ledger(5)
    ledger.add(torch.tensor([0, 1, 2]))
    assert audit(ledger.counts, torch.tensor([2, 0, 1])).samples_lost == 0
    assert audit(ledger.counts, torch.arange(5)).samples_lost == 2


def test_audits_add_up_over_epochs() -> None:
    assert Audit(10, 1, 2) + Audit(20, 3, 4) == Audit(30, 4, 6)
