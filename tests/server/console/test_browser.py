"""Whole tasks in a browser, as a person does them; and what holds for every page: keyboard, themes, widths, no faults."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from metaq.server.console.visit import ROOT
from tests.server.console.planted import GROUP, LOST, TOPIC, planted, planted_pages
from tests.support.broker import BrokerProcess
from tests.support.chromium import DEADLINE_MS, WIDE, faults_of_pages, new_page
from tests.support.rest import Rest
from tests.support.users import ADMIN, READER, write_users
from tests.support.users import TOPIC as READABLE

pytestmark = [pytest.mark.slow, pytest.mark.partner("chromium", "fonts")]


@pytest.fixture(scope="module")
def lost(broker: BrokerProcess) -> Iterator[str]:
    """The broker's id of the message that is looked for."""
    with planted(broker) as offset_id:
        yield offset_id


@pytest.fixture
def page(browser: Browser, broker: BrokerProcess, lost: str) -> Iterator[Page]:
    """The first page of the planted broker."""
    with new_page(browser, viewport=WIDE) as page:
        page.goto(f"http://{broker.http}/")
        yield page


# -- tasks ------------------------------------------------------------------------------------------------------------


def test_find_a_lost_message_by_its_key_and_who_consumed_it(page: Page, lost: str) -> None:
    """MQ-112: from the first page, by what is written on it."""
    page.get_by_role("link", name="Find a message").click()
    page.get_by_label("Topic").fill(TOPIC)
    page.get_by_label("Key", exact=True).fill(LOST)
    page.get_by_role("button", name="Find").click()
    page.get_by_role("region", name="Messages").get_by_role("row").nth(1).get_by_role("link").first.click()
    expect(page).to_have_url(f"{page.url.partition(ROOT)[0]}{ROOT}/messages/{lost}")
    expect(page.locator("pre")).to_contain_text('"order": 2017')
    groups = page.get_by_role("region", name="Groups")
    expect(groups.get_by_role("row").filter(has_text=GROUP)).to_contain_text("consumed")
    expect(groups.get_by_role("row").filter(has_text="shipping")).to_contain_text("not yet")
    page.get_by_role("link", name="HEX").click()
    expect(page.locator("pre")).to_contain_text("00000000  7b 22")


def test_reset_a_group_after_a_preview(page: Page, broker: BrokerProcess) -> None:
    """MQ-111: the preview says how many messages; only then is it done."""
    page.get_by_role("link", name="Groups", exact=True).click()
    page.get_by_role("link", name="shipping").click()
    page.get_by_role("link", name="Reset").click()
    page.get_by_label("Go on at").select_option(label="the oldest message")
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_role("region", name="What would change")).to_contain_text("consumes 12 messages again")
    with Rest(broker.http) as rest:
        assert [row["committed"] for row in rest.get("/groups/shipping/lag")["partitions"]] == [2, 4, 12]
        page.get_by_role("button", name="Reset the offsets").click()
        expect(page.get_by_role("status")).to_have_text("The offsets were reset.")
        assert [row["committed"] for row in rest.get("/groups/shipping/lag")["partitions"]] == [0, 0, 0]
    expect(page).to_have_url(f"{page.url.partition(ROOT)[0]}{ROOT}/groups/shipping")  # the notice is not said again


def test_watch_the_lag_fall(page: Page, broker: BrokerProcess) -> None:
    """MQ-111: the page changes by itself while a consumer commits; it is not loaded again."""
    topic, group = "falling", "fallers"
    with Rest(broker.http) as rest:
        rest.put(f"/topics/{topic}", {"partitions": 1})
        rest.put(f"/groups/{group}", {})
        rest.publish(topic, *map(str, range(7)))
        rest.post(f"/groups/{group}/offsets", {"topic": topic, "offsets": {"0": 0}})
        page.goto(f"http://{broker.http}{ROOT}/groups/{group}")
        lag = page.locator("#lag")
        expect(lag).to_contain_text("7")
        page.evaluate("document.body.dataset.loaded = 'once'")
        for left in (4, 0):
            rest.post(f"/groups/{group}/offsets", {"topic": topic, "offsets": {"0": 7 - left}})
            expect(lag).to_contain_text(str(left), timeout=DEADLINE_MS)
    assert page.evaluate("document.body.dataset.loaded") == "once"


def test_follow_a_topic(page: Page, broker: BrokerProcess) -> None:
    """MQ-112: messages come by themselves, the newest first, with nothing of them run; a pause is one."""
    with Rest(broker.http) as rest:
        rest.put("/topics/followed", {"partitions": 1})
        page.goto(f"http://{broker.http}{ROOT}/topics/followed/tail")
        expect(page.locator("#state")).to_have_text("live")
        rest.publish("followed", "<img src=x onerror='document.title=\"run\"'>", "second")
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.first).to_contain_text("second")
        expect(rows.last).to_contain_text("<img src=x")
        page.get_by_role("button", name="Pause").click()
        expect(page.locator("#state")).to_have_text("paused")
        rest.publish("followed", "third")
        page.get_by_role("button", name="Go on").click()
        expect(page.locator("#state")).to_have_text("live")
        rest.publish("followed", "fourth")
        expect(rows).to_have_count(3)
        expect(rows.first).to_contain_text("fourth")
    assert page.title() != "run"


def test_without_scripts_a_topic_is_made_and_published_to(browser: Browser, broker: BrokerProcess) -> None:
    """MY-032: forms are forms."""
    with new_page(browser, viewport=WIDE, java_script_enabled=False) as page:
        page.goto(f"http://{broker.http}{ROOT}/topics")
        page.get_by_role("link", name="New topic").click()
        page.get_by_label("Name").fill("plain")
        page.get_by_role("button", name="Create").click()
        page.get_by_role("link", name="Publish").click()
        page.get_by_label("Body").fill("hello")
        page.get_by_role("button", name="Publish").click()
        expect(page.locator("pre")).to_have_text("hello")


def test_who_may_only_read_logs_in_and_is_refused_a_change(browser: Browser, tmp_path: Path) -> None:
    """E-05: with the sentence, beside what was typed; after the logout, nothing is shown."""
    users = write_users(tmp_path / "users.yaml")
    with BrokerProcess(tmp_path / "data", "--users-file", str(users)) as broker:
        with Rest(broker.http, ADMIN) as rest:
            rest.put(f"/topics/{READABLE}", {"partitions": 1})
        assert faults_of_pages(browser, [f"http://{broker.http}{ROOT}/login"]) == {}
        with new_page(browser, viewport=WIDE) as page:
            page.goto(f"http://{broker.http}{ROOT}/topics/{READABLE}")
            page.get_by_label("User").fill(READER.name)
            page.get_by_label("Password or secret").fill(READER.secret)
            page.get_by_role("button", name="Log in").click()
            expect(page.get_by_role("heading", name=READABLE, exact=True)).to_be_visible()
            page.get_by_role("link", name="Publish").click()
            page.get_by_label("Body").fill("not mine")
            page.get_by_role("button", name="Publish").click()
            expect(page.get_by_role("alert")).to_contain_text(f"{READER.name} may not publish to {READABLE}")
            expect(page.get_by_label("Body")).to_have_value("not mine")
            page.get_by_role("button", name="Log out").click()
            page.goto(f"http://{broker.http}{ROOT}/topics/{READABLE}")
            expect(page.get_by_label("User")).to_be_visible()


# -- every page -------------------------------------------------------------------------------------------------------


def test_no_page_has_a_serious_fault(browser: Browser, broker: BrokerProcess, lost: str) -> None:
    """MQ-104: axe-core finds none, in both themes and at two widths; nothing is wider than the window.

    No script fails, and the policy forbids nothing (``new_page``).
    """
    assert faults_of_pages(browser, [f"http://{broker.http}{path}" for path in planted_pages(lost)]) == {}


def test_by_keyboard(page: Page) -> None:
    """MQ-104: the first stop leads past the navigation, and every stop is seen."""
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
