"""Samples of the crash proof on a faulty disk; the full counts are `make test-long`.

A failure names the command that replays it.
"""

import random

import pytest

from tests.crash import flips, full, power, syncs, torn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_nothing_synced_is_lost_in_power_cuts() -> None:
    """MQ-039, MQ-040: 5,000 images: each opens, what was synced is in its place, without a hole before it."""
    assert power.run(seed=0, count=5_000).cases >= 5_000


def test_a_torn_file_costs_only_the_torn_records() -> None:
    """Every file of a folder cut short and zeroed at every byte of its last three records."""
    assert torn.run(seed=0, count=1).cases > 1_000


def test_a_flipped_bit_is_named_and_costs_at_most_its_message() -> None:
    """E-10: 2,000 flips, the class of the file drawn evenly."""
    assert flips.run(seed=0, count=2_000).details["flips"] >= 2_000


def test_a_full_disk_refuses_and_recovers_by_itself() -> None:
    """A tenth of the first 500 calls that need room."""
    for call in random.Random(0).sample(range(1, 501), 50):
        full.one_case(call)


def test_a_failed_sync_acknowledges_nothing() -> None:
    """500 syncs that fail: nothing they should cover is acknowledged, nothing more is taken, a restart loses nothing."""
    assert syncs.run(seed=0, count=500).cases >= 500
