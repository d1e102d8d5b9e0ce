"""Three replicas whose master is killed under load, and workers that go on with the next one: no task is lost."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from kombu_support import DONE_S, POOLS, Journal, Place, Worker, journal, workers

from tests.support.broker import wait_until
from tests.support.group import Group, Member
from tests.support.zookeeper import ZooKeeperProcess

__all__ = ["journal", "workers"]  # fixtures

pytestmark = [pytest.mark.slow, pytest.mark.partner("java"), pytest.mark.timeout(600)]

BEFORE: Final = 50
AFTER: Final = 50
"""The tasks that are sent at least before the master is killed, and after another one has taken over."""
MOST: Final = 5_000
LONG: Final = ("long-1", "long-2")
"""The tasks that run while there is no master."""


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    folder = tmp_path_factory.mktemp("group")
    with ZooKeeperProcess(folder / "zookeeper") as server, Group(folder, server.address) as running:
        yield running


def url_of(group: Group, first: Member) -> str:
    """The URL with the registries of all replicas, that of ``first`` before the others."""
    members = sorted(group.members.values(), key=lambda member: member is not first)
    return ";".join(f"metaq://{member.registry}//" for member in members)


class Sender:
    """A program that sends tasks one after the other, from entering the ``with`` block until leaving it."""

    def __init__(self, place: Place) -> None:
        self.names: list[str] = []
        """The tasks of sends that have returned."""
        self._place = place
        self._ends = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> "Sender":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _send(self) -> None:
        try:
            for number in range(MOST):
                if self._ends.wait(0.01):
                    return
                self._place.send("mark_late", f"task-{number}")
                self.names.append(f"task-{number}")
        except BaseException as error:  # noqa: BLE001 - raised where the test looks
            self._error = error

    def wait_more(self, count: int) -> None:
        """Wait until so many more sends have returned."""
        most = len(self.names) + count
        wait_until(lambda: len(self.names) >= most or self._error is not None, DONE_S, f"{count} more tasks are sent")


@pytest.mark.parametrize("pool", sorted(POOLS))
def test_a_master_that_is_killed_loses_no_task_and_runs_none_twice(
    group: Group, journal: Journal, tmp_path: Path, workers: list[Worker], pool: str
) -> None:
    """Also those that are sent, given or acked at that moment: the next master knows of the queue, of leases and of acks."""
    group.heal()
    group.wait_whole()
    master = group.wait_master()
    place = Place(url_of(group, master), journal, task_default_queue=pool)
    workers.append(Worker(place, tmp_path / "worker.log", *POOLS[pool], "-Q", pool).wait_ready())
    with Sender(place) as sender:
        sender.wait_more(BEFORE)
        for name in LONG:
            place.send("dawdle_late", name, 8.0)
        journal.wait_for(*(f"begin {name}" for name in LONG))
        master.kill()
        assert group.wait_master() is not master
        sender.wait_more(AFTER)
    place.send("mark_late", "later", countdown=1.0)
    journal.wait_for(*sender.names, *(f"end {name}" for name in LONG), "later")
    assert workers[0].terminate() == 0
    assert {line: count for line, count in journal.counts().items() if count > 1} == {}
    place.close()
