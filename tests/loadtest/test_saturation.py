"""The search for saturation, on services of known capacity."""

import asyncio

import pytest

from redraft.loadtest.saturation import Probe, find


def search(capacity, first, errors_above=float("inf")):
    asked = []

    async def probe(rate):
        asked.append(rate)
        return Probe(rate, rate, min(rate, capacity), int(rate > errors_above))

    return asyncio.run(find(probe, first)), asked


@pytest.mark.parametrize("first", [0.5, 7.0, 300.0])
def test_a_capacity_is_found_from_below_and_from_above(first):
    found, asked = search(7.3, first)
    assert found.throughput == 7.3
    assert 7.3 / 1.1 <= found.followed <= 7.3 / 0.95
    assert len(asked) < 14
    assert found.to_json()["probes"][0]["rate"] == first


def test_a_service_that_refuses_does_not_follow():
    found, _ = search(1000, 1.0, errors_above=5)
    assert 5 / 1.1 <= found.followed <= 5


def test_the_search_ends_where_there_is_no_limit_or_nothing_is_answered():
    assert search(1e9, 1.0)[0].followed == 1024
    assert search(0.0, 1.0)[0].followed == 0


def test_a_probe_says_what_came_of_it():
    assert "2.00 were due and 1.50 completed per second, 3 errors: it does not follow" in str(Probe(2, 2, 1.5, 3))
