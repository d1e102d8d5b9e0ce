"""A sync that fails under leases: nothing is acknowledged after it, and the next opening has all that was acknowledged before.

What was synced before comes to each group unless it is finished, and dead letters come once (``tests.engine.leases.cut``),
whether the process is killed after the failure or the power is cut.

Replay one case: ``python -m tests.crash.leasesyncs --seed N``.
"""

from metaq.errors import DiskFailed, NotWritable
from tests.crash.command import Result, expect, main, run_until
from tests.crash.driver import case
from tests.engine.leases.cut import Cut
from tests.engine.leases.leased import GROUPS, TOPIC

MOST_SYNCS = 60


def run(seed: int, count: int) -> Result:
    """Let ``count`` syncs fail."""
    return run_until(one_case, "failed syncs", seed, count, "leasesyncs")


def one_case(seed: int) -> dict[str, int]:
    """Work until a random sync fails, see that nothing more is taken, and open the folder again."""
    with case("tests.crash.leasesyncs", seed):
        life = Cut(seed)
        disk = life.broker.disk
        disk.failing_sync = disk.syncs + life.rng.randrange(1, MOST_SYNCS)
        try:
            while disk.syncs < disk.failing_sync:
                life.work()
        except DiskFailed as error:
            of_log = life.broker.store.failure is not None
            expect(of_log or "/config/" in str(error), "the store knows of its failure, but for tables", error)
        else:
            of_log = life.broker.store.failure is not None
            expect(of_log, "a sync that fails is noticed")
        if of_log:
            _expect_refusals(life)
        disk.failing_sync = None
        cut = life.rng.random() < 0.5
        if cut:
            life.cut()
        else:
            life.broker = life.broker.killed()
            life.deliveries.clear()
        life.check()
        if not cut:
            undone = [body for place, _, _, body in life.deliveries if (place.group, body) in life.acknowledged]
            expect(not undone, "an ack that was answered is not undone by a kill", undone)
        return {
            "failed syncs": of_log,
            "failed syncs of tables": not of_log,
            "power cuts": cut,
            "acknowledged": len(life.acknowledged),
        }


def _expect_refusals(life: Cut) -> None:
    """Check that a put is refused, and that nobody is told that an ack is kept."""
    broker = life.broker
    expect(not broker.put(TOPIC, 0, b"refused"), "nothing is stored after a failed sync")
    try:
        broker.store.check_healthy()
    except NotWritable:
        pass
    else:
        expect(False, "an ack is refused by this check")
    letters = [len(broker.dead_letters(group)) for group in GROUPS]
    life.reject()
    broker.end_turn()
    expect(letters == [len(broker.dead_letters(group)) for group in GROUPS], "nothing becomes a dead letter")


if __name__ == "__main__":
    main(one_case)
