"""Power cuts at random moments, also during recovery: all synced data is there, and all that is there is right.

A case is the life of one data folder: work, an end at a random call to the disk, and so on. At each power cut several images
are made of the same moment; each is opened (or cut again while it is opened), compared with the model, and written to.

Replay one case: ``python -m tests.crash.power --seed N``.
"""

import random
from typing import Final

from tests.crash.command import Result, main, run_until
from tests.crash.driver import Driver, case, random_settings
from tests.support.faultydisk import FaultyDisk, Stopped

LIVES: Final = 6
"""Ends of a process in one case."""
IMAGES_EACH: Final = 4
CUT_WHILE_OPENING: Final = 0.25
ROLE_CHANGES: Final = 0.03
"""Of all steps."""


def run(seed: int, count: int) -> Result:
    """Make and open ``count`` images."""
    return run_until(one_case, "images", seed, count, "power cuts")


def one_case(seed: int) -> dict[str, int]:
    """Live one data folder; return how many images were opened, and so on."""
    rng = random.Random(seed)
    counts = {
        "images": 0,
        "kills": 0,
        "ended while opening": 0,
        "orderly stops": 0,
        "verified after a stop": 0,
        "ended while repairing": 0,
    }
    with case("tests.crash.power", seed):
        driver = Driver(rng, FaultyDisk(rng), random_settings(rng))
        for _ in range(LIVES):
            counts["orderly stops"] += _live(driver)
            if rng.random() < 0.2:
                driver.ended(power=False)
                counts["kills"] += 1
                driver.expect_verified()
                continue
            twins = [driver.fork(driver.disk) for _ in range(IMAGES_EACH)]
            for twin in twins:
                twin.ended(power=True)
                _open_image(twin, counts)
            driver = twins[-1]
            driver.ended(power=rng.random() < 0.5)
    return counts


def _live(driver: Driver) -> bool:
    """Open, work, and end at a random call to the disk; whether there was time to stop in order."""
    rng, disk = driver.rng, driver.disk
    disk.stop_at = disk.calls + 1 + rng.choice((rng.randrange(15), rng.randrange(100), rng.randrange(400)))
    try:
        driver.open()
        for _ in range(rng.choice((5, 20, 40))):
            if rng.random() < ROLE_CHANGES:
                driver.change_role()
            driver.step()
        driver.close()
    except Stopped:
        return False
    return True


def _open_image(driver: Driver, counts: dict[str, int]) -> None:
    """Open a fresh image, perhaps after more cuts while that is done, and use it a little."""
    rng = driver.rng
    while rng.random() < CUT_WHILE_OPENING:
        driver.disk.stop_at = driver.disk.calls + 1 + rng.randrange(20)
        try:
            driver.open()
            counts["images"] += 1
        except Stopped:
            counts["ended while opening"] += 1
        driver.ended(power=rng.random() < 0.7)
    driver.disk.stop_at = None
    driver.open()
    counts["images"] += 1
    driver.put()
    driver.sync()
    if rng.random() < 0.2:
        driver.checkpoint()
    driver.read()
    if rng.random() < 0.1:
        driver.close()
        driver.expect_verified()
        counts["verified after a stop"] += 1
        if rng.random() < 0.5:
            _repair(driver, counts)


def _repair(driver: Driver, counts: dict[str, int]) -> None:
    """Rebuild what is derived, perhaps until the power is cut in the middle of it."""
    rng = driver.rng
    if rng.random() < 0.5:
        driver.disk.stop_at = driver.disk.calls + 1 + rng.randrange(60)
    try:
        driver.repair()
    except Stopped:
        counts["ended while repairing"] += 1
    driver.ended(power=rng.random() < 0.7)
    driver.disk.stop_at = None
    driver.open()


if __name__ == "__main__":
    main(one_case)
