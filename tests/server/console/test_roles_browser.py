"""Masters changed in a browser: a hand-over, a promotion and a demotion between real replicas, while clients go on."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from metaq.client import Client, ConsumeFrom, connect
from metaq.errors import MetaqError
from metaq.server.console.visit import ROOT
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until
from tests.support.chromium import WIDE, faults_of_pages, new_page
from tests.support.cluster import Cluster, ReplicaProcess
from tests.support.console import Visits
from tests.support.group import Group
from tests.support.zookeeper import ZooKeeperProcess

pytestmark = [pytest.mark.slow, pytest.mark.partner("chromium", "fonts")]

TOPIC: Final = "orders"
SAID_WITHIN_MS: Final = 10_000
DEADLINE_S: Final = 60.0
PATIENT_S: Final = 30.0
AWAY: Final = ("status of 503", "Error Code 503")
"""The reports, of a browser and of htmx, about a part that is loaded while a replica changes its role."""


class Sender(threading.Thread):
    """Sends numbers, one after the other, until it is told to stop; an error ends it."""

    def __init__(self, client: Client) -> None:
        super().__init__(daemon=True)
        self.acknowledged = 0
        self.error: MetaqError | None = None
        self._client = client
        self._stopped = threading.Event()

    def run(self) -> None:
        with self._client.producer() as producer:
            while not self._stopped.wait(0.01):
                try:
                    producer.send(TOPIC, b"%d" % self.acknowledged, timeout_s=PATIENT_S)
                except MetaqError as error:
                    self.error = error
                    return
                self.acknowledged += 1

    def wait_more(self) -> None:
        """Wait until it has sent some more: they are with whoever is master now."""
        before = self.acknowledged
        wait_until(lambda: self.error is not None or self.acknowledged > before + 10, DEADLINE_S, "clients go on", 0.05)
        assert self.error is None

    def end(self) -> None:
        """Send no more."""
        self._stopped.set()
        self.join(DEADLINE_S)

    def stop(self) -> int:
        """Return how many were acknowledged, after the last one."""
        self.end()
        assert self.error is None
        return self.acknowledged


@contextmanager
def sending(client: Client) -> Iterator[Sender]:
    client.admin().create_topic(TOPIC, 1)
    sender = Sender(client)
    sender.start()
    try:
        sender.wait_more()
        yield sender
    finally:
        sender.end()


def check_received(client: Client, count: int) -> None:
    """Every number that was acknowledged comes to a consumer, in the order in which it was sent."""
    received: dict[bytes, None] = {}
    with client.consumer(TOPIC, "readers", consume_from=ConsumeFrom.FIRST) as consumer:
        while len(received) < count:
            message = consumer.receive(timeout_s=DEADLINE_S)
            assert message is not None, f"{len(received)} of {count} came, and no more within {DEADLINE_S} s"
            received[message.body] = None
    assert list(received)[:count] == [b"%d" % number for number in range(count)]


def open_cluster(page: Page, replica: BrokerProcess) -> None:
    page.goto(f"http://{replica.http}{ROOT}/cluster")


def rows_of(page: Page, role: str, replica: ReplicaProcess) -> Locator:
    """The row that shows this replica in this role, and that it answers."""
    rows = page.get_by_role("region", name="Replicas of").get_by_role("row").filter(has_text="answers")
    return rows.filter(has_text=re.compile(rf"{role}\s+{replica.number}\b"))


def expect_roles(page: Page, own: str, *rows: Locator) -> None:
    """The page says so within 10 s by itself, also at its head."""
    for row in rows:
        expect(row).to_have_count(1, timeout=SAID_WITHIN_MS)
    expect(page.locator("#role")).to_have_text(own, timeout=SAID_WITHIN_MS)


def order(page: Page, word: str) -> None:
    """Go to the confirmation of an order, which changes nothing yet."""
    page.get_by_role("link", name=word).click()
    expect(page.get_by_role("button", name=word)).to_be_visible()


def press(page: Page, word: str, notice: str) -> None:
    """Confirm it: the browser goes on to the page of the cluster, which may have to wait for the replica."""
    page.get_by_role("button", name=word).click()
    expect(page.get_by_role("status")).to_contain_text(notice)


@pytest.mark.partner("java")
def test_the_role_is_handed_over(browser: Browser, tmp_path: Path) -> None:
    """E-32, MQ-070: to a replica in sync, while a client sends; the page says who is master within 10 s."""
    with (
        ZooKeeperProcess(tmp_path / "zookeeper") as server,
        RegistryProcess(tmp_path / "registry") as registry,
        Group(tmp_path, server.address, "--registries", registry.address) as group,
        connect(registry.address) as client,
    ):
        old = group.wait_master()
        new, third = (member for member in group.members.values() if member is not old)
        with sending(client) as sender, new_page(browser, AWAY, viewport=WIDE) as page:
            open_cluster(page, old)
            order(page, "Hand over")
            expect(page.locator("main")).to_contain_text("no message is lost")
            assert group.wait_master() is old
            page.get_by_label(f"{new.number} at").check()
            press(page, "Hand over", "Handed over")
            wait_until(lambda: new.status()["role"] == "master", DEADLINE_S, "the role is handed over")
            expect_roles(page, "slave", rows_of(page, "master", new), rows_of(page, "slave", old))
            sender.wait_more()
            assert group.wait_master() is new
            assert "console change user=anonymous address=127.0.0.1 operation=hand_over_role" in old.stderr()
            check_received(client, sender.stop())
            check_elected(page, group)
            group.wait_whole()
            check_promotion_where_masters_are_elected(page, group, third.number)


def check_elected(page: Page, group: Group) -> None:
    """Where masters are elected none is demoted, and its page offers no such thing."""
    master = group.wait_master()
    open_cluster(page, master)
    expect(page.get_by_role("link", name="Hand over")).to_be_visible()
    expect(page.get_by_role("link", name="Demote")).to_have_count(0)
    with Visits(master.http) as visits:
        form = visits.page("/cluster/demote")
        assert "Hand over instead" in form.text and "Master that it follows" not in form.text
        alert = visits.submit(form, "/cluster/demote", 400, master="127.0.0.1:1").alert
        assert "elected through ZooKeeper" in alert and "metaq cluster" not in alert


def check_promotion_where_masters_are_elected(page: Page, group: Group, number: int) -> None:
    """None is promoted while the elected master is there."""
    master = group.wait_master()
    open_cluster(page, group.members[number])
    order(page, "Promote")
    expect(page.locator("main")).to_contain_text("no other replica can be made master while it is there")
    page.get_by_role("button", name="Promote").click()
    expect(page.get_by_role("alert")).to_contain_text(f"replica {master.number} is master: hand over instead")
    assert group.wait_master() is master


def test_a_slave_is_promoted_and_the_old_master_demoted(browser: Browser, tmp_path: Path) -> None:
    """E-32, SG-083, MQ-069: by an operator, where roles are fixed; the page says what may be lost, and who is master."""
    with (
        RegistryProcess(tmp_path / "registry") as registry,
        Cluster(tmp_path, "--min-in-sync", "1", "--registries", registry.address) as cluster,
        connect(registry.address) as client,
    ):
        master, slave = cluster.pair()
        orders = [
            f"http://{one.http}{ROOT}/cluster/{what}" for one in (master, slave) for what in ("promote", "demote", "hand-over")
        ]
        assert faults_of_pages(browser, orders) == {}
        with sending(client) as sender, new_page(browser, AWAY, viewport=WIDE) as page:
            open_cluster(page, slave)
            order(page, "Promote")
            expect(page.locator("main")).to_contain_text("There would be two masters")
            expect(page.locator("main")).not_to_contain_text("metaq cluster")
            page.get_by_role("link", name="Cancel").click()
            master.kill()
            expect(page.locator("main")).to_contain_text("it takes no messages")
            order(page, "Promote")
            expect(page.locator("main")).to_contain_text("make sure that it has stopped")
            press(page, "Promote", "Promoted")
            wait_until(lambda: slave.status()["role"] == "master", DEADLINE_S, "the slave is promoted")
            expect_roles(page, "master", rows_of(page, "master", slave))
            sender.wait_more()
            count = sender.stop()
            assert "operation=promote_slave" in slave.stderr()

            master.restart()
            open_cluster(page, master)
            expect(page.locator("#role")).to_have_text("master")
            order(page, "Demote")
            expect(page.locator("main")).to_contain_text("are removed from its log")
            page.get_by_label("Master that it follows").fill(slave.replication)
            press(page, "Demote", "Demoted")
            wait_until(lambda: master.status()["role"] == "slave", DEADLINE_S, "the old master is demoted")
            expect_roles(page, "slave", rows_of(page, "slave", master))
            followed = page.get_by_role("region", name="This replica").get_by_role("definition")
            expect(followed.filter(has_text=slave.replication)).to_have_count(1)
            expect(rows_of(page, "master", slave)).to_have_count(1)  # the registry knew one master of two
            assert "operation=demote_master" in master.stderr()
            slave.wait_for(in_sync=[1, 2])
            check_received(client, count)
