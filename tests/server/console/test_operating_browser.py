"""Whole tasks of operators in a browser: dead letters sent again, a timer cancelled, a lost master noticed, charts drawn."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, Page, expect

from metaq.server.console.visit import ROOT
from tests.server.console.operated import DEAD_GROUP, DEAD_TOPIC, dead_letters, operated, operated_pages
from tests.support.broker import BrokerProcess, RegistryProcess
from tests.support.chromium import NARROW, WIDE, faults_of_pages, new_page
from tests.support.cluster import Cluster
from tests.support.halves import NEVER
from tests.support.rest import Rest

pytestmark = [pytest.mark.slow, pytest.mark.partner("chromium", "fonts")]

MANY: Final = 1000
SAID_WITHIN_MS: Final = 10_000


@pytest.fixture(scope="module")
def flags() -> tuple[str, ...]:
    return NEVER


@pytest.fixture(scope="module")
def names(broker: BrokerProcess) -> Iterator[dict[str, str]]:
    with operated(broker) as names:
        yield names


@pytest.fixture
def page(browser: Browser, broker: BrokerProcess, names: dict[str, str]) -> Iterator[Page]:
    with new_page(browser, viewport=WIDE) as page:
        page.goto(f"http://{broker.http}/")
        yield page


def test_a_thousand_dead_letters_are_sent_again(page: Page, broker: BrokerProcess) -> None:
    """E-09: with one button, each once and in their order; then they are no dead letters any more."""
    with Rest(broker.http) as rest:
        rest.put("/topics/thousand", {"partitions": 1})
        dead_letters(rest, "thousand", "thousander", [str(number) for number in range(MANY)])
        page.get_by_role("link", name="Dead letters", exact=True).click()
        page.get_by_role("link", name="thousander").click()
        page.get_by_role("link", name="Send all again").click()
        page.get_by_label("discard those that were sent").check()
        page.get_by_role("button", name="Send 1,000 letters").click()
        expect(page.get_by_role("status")).to_have_text("Sent 1,000 again.")
        expect(page.locator("main")).to_contain_text("0 dead letters")
        sent = [
            message["body"]
            for offset in range(MANY, 2 * MANY, 250)
            for message in rest.get("/topics/thousand/partitions/0/messages", offset=offset, limit=250)["messages"]
        ]
        assert sent == [str(number) for number in range(MANY)]
        assert rest.get("/groups/thousander")["dead_letters"] == 0


def test_a_box_chooses_all(page: Page) -> None:
    """E-09: those of the page."""
    page.goto(f"{page.url.partition('/console')[0]}{ROOT}/dead-letters/{DEAD_GROUP}")
    page.get_by_label("Choose all on this page").check()
    expect(page.locator("#letters input:checked")).to_have_count(3)


def test_a_timer_is_cancelled(page: Page, broker: BrokerProcess) -> None:
    """E-12: found by its topic, asked about once more, and gone."""
    page.get_by_role("link", name="Delayed", exact=True).click()
    page.get_by_label("Of the topic").fill(DEAD_TOPIC)
    page.get_by_role("button", name="Search").click()
    row = page.get_by_role("row").filter(has_text=DEAD_TOPIC)
    expect(row).to_have_count(1)
    row.get_by_text("Cancel", exact=True).click()
    row.get_by_role("button", name="Cancel it now").click()
    expect(page.get_by_role("status")).to_contain_text("Cancelled")
    with Rest(broker.http) as rest:
        assert rest.get("/timers", topic=DEAD_TOPIC)["rows"] == []


def test_charts_are_drawn(page: Page) -> None:
    """E-32: once there are samples, in both themes, and as wide as the window allows."""
    page.get_by_role("link", name="Charts", exact=True).click()
    charts = page.locator(".chart canvas")
    expect(charts).to_have_count(page.locator("[data-chart]").count(), timeout=60_000)
    page.emulate_media(color_scheme="dark")
    expect(charts).to_have_count(page.locator("[data-chart]").count())
    page.set_viewport_size(NARROW)
    expect(charts.first).to_be_visible()
    page.wait_for_function(f"document.documentElement.scrollWidth <= {NARROW['width']}")


def test_a_lost_master_is_noticed(browser: Browser, tmp_path: Path) -> None:
    """MQ-104, E-32: after SIGKILL the page of another replica says so within 10 s, without being loaded again."""
    with RegistryProcess(tmp_path / "registry") as registry, Cluster(tmp_path, "--registries", registry.address) as cluster:
        master = cluster.add(1)
        second, _ = (cluster.add(number, master.replication) for number in (2, 3))
        master.wait_for(in_sync=[1, 2, 3])
        assert faults_of_pages(browser, [f"http://{master.http}{ROOT}/cluster"]) == {}
        with new_page(browser, viewport=WIDE) as page:
            page.goto(f"http://{second.http}{ROOT}/cluster")
            rows = page.get_by_role("region", name="Replicas of").get_by_role("row")
            expect(rows.filter(has_text="answers")).to_have_count(3, timeout=30_000)
            page.evaluate("document.body.dataset.loaded = 'once'")
            master.kill()
            killed_s = time.monotonic()
            expect(rows.filter(has_text="not reachable")).to_contain_text(master.address, timeout=SAID_WITHIN_MS)
            expect(page.locator("main")).to_contain_text("it takes no messages", timeout=SAID_WITHIN_MS)
            assert time.monotonic() - killed_s < SAID_WITHIN_MS / 1000
            assert page.evaluate("document.body.dataset.loaded") == "once"


def test_no_page_has_a_serious_fault(browser: Browser, broker: BrokerProcess, names: dict[str, str]) -> None:
    """MQ-104: axe-core finds none, in both themes and at two widths; nothing is wider than the window.

    No script fails, and the policy forbids nothing (``new_page``).
    """
    assert faults_of_pages(browser, [f"http://{broker.http}{path}" for path in operated_pages(names)]) == {}
