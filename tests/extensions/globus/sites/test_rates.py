"""Transfer rates between sites from measured copies."""

from __future__ import annotations

import pytest

from freetrain_parsl.extensions.globus.sites.planning.model import (
    ASSUMED,
    HOME,
    SiteRates,
    TransferRate,
    fit_rate,
    rates_between,
)


def test_without_copies_the_assumed_rate_holds() -> None:
    assert fit_rate([]) == ASSUMED


def test_latency_and_throughput_are_found_from_copies_of_several_sizes() -> None:
    rate = fit_rate([(size, 12.0 + size / 50e6) for size in (1e6, 1e9, 5e9)])
    assert rate.bytes_per_second == pytest.approx(50e6)
    assert rate.latency == pytest.approx(12.0)


def test_copies_of_one_size_tell_the_latency_only() -> None:
    rate = fit_rate([(1e9, 25.0), (1.1e9, 25.0)], TransferRate(100e6, 1.0))
    assert rate.bytes_per_second == 100e6
    assert rate.latency == pytest.approx(25.0 - 10.5)


@pytest.mark.parametrize("copies", [[(1e9, 1.0)], [(1e6, 9.0), (1e9, 3.0)], [(0.0, 5.0)]])
def test_odd_copies_make_no_impossible_rates(copies: list[tuple[float, float]]) -> None:
    rate = fit_rate(copies)
    assert rate.latency >= 0
    assert rate.bytes_per_second > 0


def test_a_move_goes_through_home() -> None:
    rates = rates_between(
        {
            "a": SiteRates(TransferRate(100e6, 10.0), TransferRate(1e6, 1.0)),
            "b": SiteRates(TransferRate(1e6, 1.0), TransferRate(50e6, 5.0)),
        }
    )
    assert set(rates) == {(HOME, "a"), (HOME, "b"), ("a", "b"), ("b", "a")}
    assert rates["a", "b"].seconds(1e9) == pytest.approx(10 + 10 + 5 + 20)
    assert rates[HOME, "b"].seconds(1e9) == pytest.approx(25)
