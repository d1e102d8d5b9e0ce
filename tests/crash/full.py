"""A full disk: the n-th call that needs room fails, alone or with those after it, and later there is room again.

Refused messages are refused with ``DiskFull``, and for good, also after a restart. Reads go on, acknowledged messages stay, and
messages are accepted again as soon as there is room. A folder that exists opens however full the disk is, from whichever call
on, also after a power cut, and again and again. (Only where a file system cannot even overwrite with zeros, and the process
ends before it can, may a refused message of a short write come back.)

Replay one case: ``python -m tests.crash.full --seed N``; the disk is full at call N.
"""

import random
from contextlib import suppress
from typing import Final

from metaq.errors import DiskFull
from tests.crash.command import Result, expect, main, run_until
from tests.crash.driver import Driver, case, random_settings
from tests.crash.model import KEYS
from tests.support.faultydisk import FaultyDisk

STEPS_WHILE_FULL: Final = 15
STARTS_WHILE_FULL: Final = 3
FIRST_CALLS: Final = 12
"""An opening makes no more calls that need room, seldom so many."""


def run(seed: int, count: int) -> Result:
    """Let the disk be full at each of ``count`` calls from number ``seed`` on."""
    return run_until(one_case, "full at call n", seed, count, "disk full")


def one_case(seed: int) -> dict[str, int]:
    """Work until call number ``seed`` meets a full disk, go on while it is full, then with room again."""
    rng = random.Random(seed)
    counts = {"full at call n": 1, "refused": 0, "new folders not made": 0, "starts while full": 0, "with something owed": 0}
    with case("tests.crash.full", seed):
        disk = FaultyDisk(rng)
        disk.full_from, disk.full_for = seed, rng.choice((1, 1, 2, 5, 1 << 30))
        disk.short_writes, disk.copy_on_write = rng.random() < 0.6, rng.random() < 0.6
        ends_at_once = disk.full_for == 1 and rng.random() < 0.5
        driver = Driver(rng, disk, random_settings(rng))
        if not _open(driver):
            counts["new folders not made"] += 1
        while disk.space_calls < seed:
            with suppress(DiskFull):
                driver.step()
        if ends_at_once:
            driver.ended(power=rng.random() < 0.5)
            driver.open()
        for _ in range(STEPS_WHILE_FULL):
            try:
                driver.step()
            except DiskFull:
                counts["refused"] += 1
        for key in KEYS:
            driver.read_partition(key)
        disk.full_from = None
        _go_on(driver)
        _restart(driver)
        _start_while_full(driver, counts)
    return counts


def _start_while_full(driver: Driver, counts: dict[str, int]) -> None:
    """Some lives on a full disk, each with another end, and one with room again."""
    rng, disk = driver.rng, driver.disk
    driver.ended(power=False)
    driver.open()
    for _ in range(rng.randrange(STEPS_WHILE_FULL)):
        driver.step()
    for _ in range(rng.randrange(1, STARTS_WHILE_FULL + 1)):
        driver.ended(power=rng.random() < 0.6)
        disk = driver.disk
        disk.full_from, disk.full_for = disk.space_calls + 1 + rng.randrange(FIRST_CALLS), 1 << 30
        disk.copy_on_write = rng.random() < 0.5
        disk.short_writes = not disk.copy_on_write and rng.random() < 0.5
        driver.open()
        counts["starts while full"] += 1
        counts["with something owed"] += driver.store.log.owed.reason is not None
        for _ in range(rng.randrange(STEPS_WHILE_FULL)):
            try:
                driver.step()
            except DiskFull:
                counts["refused"] += 1
        for key in KEYS:
            driver.read_partition(key)
        if driver.store.log._leftover:  # see the module
            disk.full_from = None
            _go_on(driver)
    disk.full_from = None
    _go_on(driver)
    _restart(driver)


def _open(driver: Driver) -> bool:
    """Make the folder, with room again if it is refused now; whether it was not."""
    try:
        driver.open()
    except DiskFull:
        driver.disk.killed()
        driver.disk.full_from = None
        driver.open()
        return False
    return True


def _go_on(driver: Driver) -> None:
    """With room again everything works, without a restart."""
    driver.prepare()
    driver.sweep()
    expect(driver.store.failure is None, "a full disk is no failure", driver.store.failure)
    before = driver.store.messages_put
    driver.put()
    driver.sync()
    driver.checkpoint()
    expect(driver.store.messages_put > before, "messages are taken again")
    for key in KEYS:
        driver.read_partition(key)


def _restart(driver: Driver) -> None:
    """End the process in a random way and check, after a start, that refused puts stay away and accepted ones are there."""
    end = driver.rng.choice(("stop", "kill", "power cut"))
    if end == "stop":
        driver.close()
    driver.ended(power=end == "power cut")
    driver.open()
    driver.put()
    driver.close()
    driver.expect_verified()


if __name__ == "__main__":
    main(one_case)
