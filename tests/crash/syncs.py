"""A sync that fails: its pages count as clean from then on, and the disk has the old ones.

What it was to cover is not acknowledged, nothing more is accepted, and the next start makes durable what it shows to readers,
so that a power cut later on finds all of it.

Replay one case: ``python -m tests.crash.syncs --seed N``.
"""

import random

from metaq.errors import DiskFailed, NotWritable, StoreError
from metaq.message import Durability
from tests.crash.command import Result, expect, main, run_until
from tests.crash.driver import Driver, case, random_settings
from tests.support.faultydisk import FaultyDisk


def run(seed: int, count: int) -> Result:
    """Let ``count`` syncs fail."""
    return run_until(one_case, "failed syncs", seed, count, "failed sync")


def one_case(seed: int) -> dict[str, int]:
    """Work until a random sync fails, see that nothing more is taken, restart, work, cut the power, compare."""
    rng = random.Random(seed)
    counts = {"failed syncs": 0, "failed while opening": 0, "cuts": 0}
    with case("tests.crash.syncs", seed):
        driver = Driver(rng, FaultyDisk(rng), random_settings(rng))
        driver.interleaved = False
        driver.disk.failing_sync = rng.choice((rng.randrange(1, 8), rng.randrange(1, 100)))
        try:
            driver.open()
            while True:
                driver.step()
        except DiskFailed:
            counts["failed syncs"] += 1
        opened = hasattr(driver, "store")
        if opened and driver.store.failure is not None:
            _expect_read_only(driver)
        counts["failed while opening"] += not opened
        driver.disk.failing_sync = None
        if opened and rng.random() < 0.3:
            driver.store.close()
        driver.ended(power=rng.random() < 0.2)
        driver.open()
        for _ in range(rng.randrange(12)):
            driver.step()
        driver.ended(power=True)
        driver.open()
        counts["cuts"] += 1
    return counts


def _expect_read_only(driver: Driver) -> None:
    store, synced = driver.store, {key: track.synced for key, track in driver.model.tracks.items()}
    try:
        store.check_writable()
    except NotWritable:
        pass
    else:
        expect(False, "a store whose sync failed takes nothing more")
    if store.log.end > store.durable_end:
        try:
            store.sync()
        except StoreError:
            pass
        else:
            expect(False, "what a failed sync should cover is not acknowledged")
    if store.settings.durability is Durability.DISK:
        for key, count in synced.items():
            expect(store.queue(*key).readable <= count, "readers see only what is durable", key)


if __name__ == "__main__":
    main(one_case)
