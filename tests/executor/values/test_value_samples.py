"""The values that the journal keeps for curves are few, however many a training job reports."""

from __future__ import annotations

import json

import pytest

from freetrain_parsl.executor.journal import Journal, ValueSamples, read_journal
from freetrain_parsl.protocol.reports import Progress


def row(step, **values):
    return json.dumps({"step": step, "epoch": 0, "time": 0.0, "values": values})


@pytest.mark.parametrize("period", [0.01, 1.0, 30.0])
def test_a_day_of_values_has_a_few_hundred_samples(period):
    samples = ValueSamples()
    count = min(200_000, int(86_400 / period))
    times = [place * 86_400 / count for place in range(count)]
    kept = [time for time in times if samples.choose(time, "t", {"loss": 1.0})]
    assert 200 < len(kept) < 500
    assert kept[1] < 40.0, "the beginning is seen in detail"


def test_a_value_reported_rarely_is_kept_beside_a_frequent_one():
    samples = ValueSamples()
    rare, often = {"loss": 1.0, "accuracy": 0.5}, {"loss": 1.0}
    kept = [samples.choose(time, "t", rare if time % 900 == 0 else often) for time in range(36_000)]
    assert sum("accuracy" in values for values in kept) == 40


def test_only_finite_numbers_are_kept_and_of_few_names():
    samples = ValueSamples()
    assert samples.choose(0.0, "t", {"a": float("nan"), "b": "text", "c": True, "d": None, "e": 2}) == {"e": 2.0}
    assert len(samples.choose(1.0, "t", {f"name-{number}": 1.0 for number in range(100)})) < 20


def test_rows_that_are_none_and_trainings_that_are_unknown_have_no_values():
    samples = ValueSamples()
    assert list(samples.choose_rows(0.0, "stranger", [row(1, loss=1.0)])) == []
    samples.admit("t")
    rows = ["{", "[]", row(7, loss=1.0, accuracy=0.5)]
    assert list(samples.choose_rows(0.0, "t", rows)) == [(7, {"loss": 1.0, "accuracy": 0.5})]


def test_a_logged_loss_is_no_second_curve_of_a_training_whose_steps_have_one():
    """The curve ``loss`` is the mean of all samples; one that only logs a loss has that."""
    samples = ValueSamples()
    assert samples.choose_loss(0.0, "t", 0.9) == {"loss": 0.9}
    assert list(samples.choose_rows(0.0, "t", [row(7, loss=1.0, accuracy=0.5)])) == [(7, {"accuracy": 0.5})]
    samples.admit("u")
    assert list(samples.choose_rows(0.0, "u", [row(7, loss=1.0)])) == [(7, {"loss": 1.0})]


def test_the_journal_has_a_sample_of_the_losses_and_logged_values(tmp_path):
    journal = Journal(tmp_path / "journal.sqlite")
    for step in range(100):
        journal.keep_progress(step / 100, "t", Progress(step=step, loss=1.0 / (step + 1)))
        journal.keep_values(step / 100, "t", [row(step, accuracy=0.5)])
        journal.keep_values(step / 100, "stranger", [row(step, accuracy=0.5)])
    journal.close()
    entries = [(entry.kind, entry.subject, entry.detail) for _, entry in read_journal(journal.path)]
    assert entries == [
        ("values_sampled", "t", {"step": 0, "values": {"loss": 1.0}}),
        ("values_sampled", "t", {"step": 0, "values": {"accuracy": 0.5}}),
    ]
