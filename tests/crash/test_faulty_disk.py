"""Samples of the crash proof on a faulty disk, other cases for each commit; the full counts are `make test-long`.

A failure names the command that replays it.
"""

import random

import pytest

from tests.crash import flips, full, leasesyncs, power, syncs, torn
from tests.support.samples import seed_of_tree


def test_a_few_of_each() -> None:
    """MQ-039, MQ-040, E-10: what the tests below look at for longer."""
    seed = seed_of_tree()
    assert power.run(seed, 30).cases >= 30
    assert torn.one_case(seed, share=0.01)["cuts"] > 20
    assert flips.run(seed, 10).cases >= 10
    full.one_case(1 + seed % 500)
    assert syncs.run(seed, 10).cases >= 10
    assert leasesyncs.run(seed, 2).cases >= 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_synced_is_lost_in_power_cuts() -> None:
    """MQ-039, MQ-040: 300 images: each opens, what was synced is in its place, without a hole before it."""
    assert power.run(seed_of_tree(), 300).cases >= 300


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_torn_file_costs_only_the_torn_records() -> None:
    """Every file of a folder cut short and zeroed at a fiftieth of the bytes of its last three records."""
    assert torn.one_case(seed_of_tree(), share=0.02)["cuts"] > 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_flipped_bit_is_named_and_costs_at_most_its_message() -> None:
    """E-10: 150 flips, the class of the file drawn evenly."""
    assert flips.run(seed_of_tree(), 150).details["flips"] >= 150


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_full_disk_refuses_and_recovers_by_itself() -> None:
    """A few of the first 500 calls that need room."""
    for call in random.Random(seed_of_tree()).sample(range(1, 501), 15):
        full.one_case(call)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_failed_sync_acknowledges_nothing() -> None:
    """120 syncs that fail: nothing they should cover is acknowledged, nothing more is taken, a restart loses nothing."""
    assert syncs.run(seed_of_tree(), 120).cases >= 120


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_failed_sync_undoes_no_lease() -> None:
    """F-12: 25 syncs that fail: no put or dead letter afterwards, and the next opening gives all that is not finished."""
    assert leasesyncs.run(seed_of_tree(), 25).cases >= 25
