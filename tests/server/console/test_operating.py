"""The pages for operators by HTTP: what they show, what their forms change, and what refuses it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.engine.figures.history import Figures
from metaq.server.console.pages.charts import CHARTS
from metaq.server.console.visit import ROOT
from tests.server.console.operated import (
    DEAD_GROUP,
    DEAD_TOPIC,
    HOUR_MS,
    RECURRING,
    TOPIC,
    dead_letters,
    operated,
    operated_pages,
)
from tests.server.console.test_pages import HOSTILE, check_harmless
from tests.support.broker import BrokerProcess, wait_until
from tests.support.console import Visits
from tests.support.halves import NEVER, Producer
from tests.support.rest import Rest
from tests.support.users import ADMIN, READER, WRITER, write_users

DEADLINE_S: Final = 60.0
MORE_THAN_ONE_REQUEST: Final = 300
"""Dead letters; one request of the API takes 256."""


@pytest.fixture(scope="module")
def flags() -> tuple[str, ...]:
    return NEVER


@pytest.fixture(scope="module", autouse=True)
def names(broker: BrokerProcess) -> Iterator[dict[str, str]]:
    with operated(broker) as names:
        yield names


def test_every_page_answers_and_is_harmless(visits: Visits, names: dict[str, str]) -> None:
    """MQ-111: with what there is to show, and one heading of the first level."""
    for path in operated_pages(names):
        page = visits.page(path.removeprefix(ROOT))
        check_harmless(page)
        assert [tag for tag, _ in page.elements].count("h1") == 1, path


# -- dead letters -----------------------------------------------------------------------------------------------------


def test_chosen_dead_letters(visits: Visits, rest: Rest) -> None:
    """E-09: some are sent again and remain, some are sent and discarded, some are discarded; the last only with a yes."""
    rest.put("/topics/chosen", {"partitions": 1})
    letters = dead_letters(rest, "chosen", "chooser", ["a", "b", "c"])
    path, boxes = "/dead-letters/chooser", [f"letter.{letter['offset_id']}" for letter in letters]
    page = visits.page(path)
    assert "3 dead letters" in page.text
    assert "chooser" in visits.page("/dead-letters", search="choos").text
    assert "no dead letter is chosen" in visits.submit(page, path, 400, do="replay").alert
    assert "Sent 1 again." in visits.submit(page, path, 303, do="replay", **{boxes[0]: "true"}).text
    assert rest.get("/groups/chooser")["dead_letters"] == 3
    assert "you are sure" in visits.submit(page, path, 400, do="discard", **{boxes[1]: "true"}).alert
    assert rest.get("/groups/chooser")["dead_letters"] == 3
    done = visits.submit(page, path, 303, do="discard", sure="true", **{boxes[1]: "true"})
    assert "Discarded 1." in done.text and "2 dead letters" in done.text
    done = visits.submit(page, path, 303, do="replay", discard="true", to="group", **{boxes[2]: "true"})
    assert "1 dead letter" in done.text
    assert [one["body"] for one in rest.get("/groups/chooser/dead-letters")["messages"]] == ["a"]
    assert [one["body"] for one in rest.get("/topics/chosen/newest")["rows"]] == ["a", "c", "b", "a"]
    refused = visits.submit(page, path, 400, do="replay", **{boxes[1]: "true"})
    assert "1 were not; the first: the message" in refused.alert


def test_a_replay_that_is_refused_in_part(visits: Visits, rest: Rest, broker: BrokerProcess) -> None:
    """E-05: is a change, and a line of the log; one that is refused as a whole is none."""
    rest.put("/topics/parted", {"partitions": 1})
    kept, gone = (f"letter.{letter['offset_id']}" for letter in dead_letters(rest, "parted", "parter", ["a", "b"]))
    path = "/dead-letters/parter"
    page = visits.page(path)
    visits.submit(page, path, 303, do="discard", sure="true", **{gone: "true"})
    before = broker.stderr()
    assert "0 were sent again, and 1 were not" in visits.submit(page, path, 400, do="replay", **{gone: "true"}).alert
    both = {kept: "true", gone: "true"}
    assert "1 were sent again, and 1 were not" in visits.submit(page, path, 400, do="replay", **both).alert
    lines = [line for line in broker.stderr().removeprefix(before).splitlines() if "console change" in line]
    assert ["operation=change_letters" in line for line in lines] == [True]


def test_all_dead_letters(visits: Visits, rest: Rest) -> None:
    """E-09: more than one request takes are sent, in their order, and downloaded; all are discarded by their group's name."""
    bodies = [str(number) for number in range(MORE_THAN_ONE_REQUEST)]
    rest.put("/topics/many", {"partitions": 1})
    dead_letters(rest, "many", "manyer", bodies)
    file = visits.send("GET", f"{ROOT}/dead-letters/manyer/export")
    rows = [json.loads(line) for line in file.data.splitlines()]
    assert [row["body"] for row in rows] == bodies
    assert rows[0] == rest.get("/groups/manyer/dead-letters")["messages"][0]
    assert file.headers["content-disposition"].startswith("attachment")
    form = visits.page("/dead-letters/manyer/replay")
    assert f"{MORE_THAN_ONE_REQUEST} dead letters" in form.text
    done = visits.submit(form, "/dead-letters/manyer/replay", to="topic", discard="false")
    assert f"Sent {MORE_THAN_ONE_REQUEST} again." in done.text
    again = rest.get("/topics/many/partitions/0/messages", offset=MORE_THAN_ONE_REQUEST, limit=256)["messages"]
    assert [one["body"] for one in again] == bodies[:256]
    asked = visits.page("/dead-letters/manyer/discard")
    assert "type manyer" in visits.submit(asked, "/dead-letters/manyer/discard", 400, name="many").alert
    done = visits.submit(asked, "/dead-letters/manyer/discard", name="manyer")
    assert f"Discarded {MORE_THAN_ONE_REQUEST}." in done.text
    assert rest.get("/groups/manyer")["dead_letters"] == 0
    assert "has no dead letters" in visits.page("/dead-letters/manyer").text


def test_the_file_has_whole_bodies(visits: Visits, rest: Rest) -> None:
    """E-09: also of letters that the pages and the API cut: what is discarded after the download is not lost."""
    rest.put("/topics/large", {"partitions": 1})
    bodies = ["é" * 300_000, "y" * 1_000_000]
    dead_letters(rest, "large", "larger", bodies)
    assert rest.get("/groups/larger/dead-letters")["messages"][0]["cut"]
    file = visits.send("GET", f"{ROOT}/dead-letters/larger/export")
    rows = [json.loads(line) for line in file.data.splitlines()]
    assert [(row["body"] == body, row["cut"]) for row, body in zip(rows, bodies, strict=True)] == [(True, False)] * 2


def test_hostile_dead_letters(visits: Visits, rest: Rest) -> None:
    """E-05: bodies and keys are shown as they are, and the file has them."""
    rest.put("/topics/hostile", {"partitions": 1})
    dead_letters(rest, "hostile", "%3Chostile%3E", [HOSTILE], keys=["k<b>"])
    page = visits.page("/dead-letters/%253Chostile%253E")
    check_harmless(page)
    assert HOSTILE.split()[0] in page.text and "k<b>" in page.text
    file = visits.send("GET", f"{ROOT}/dead-letters/%253Chostile%253E/export")
    assert json.loads(file.data)["body"] == HOSTILE


# -- delayed ----------------------------------------------------------------------------------------------------------


def test_delayed_messages(visits: Visits, rest: Rest) -> None:
    """E-12: the next due first; those of a topic, and from a time on; one is cancelled."""
    page = visits.page("/timers")
    assert page.text.index(DEAD_TOPIC) > page.text.index(TOPIC)
    assert f"next run of {RECURRING}" in page.text
    other = visits.page("/timers", topic=DEAD_TOPIC)
    assert DEAD_TOPIC in other.links and TOPIC not in other.links
    assert "No message like that" in visits.page("/timers", 200, **{"from": "2999-01-01T00:00"}).text
    assert "is no time" in visits.page("/timers", 400, **{"from": "soon"}).alert
    rest.publish("cancelled", "x", delay_ms=HOUR_MS)
    mine = visits.page("/timers", topic="cancelled")
    done = visits.submit(mine, "/timers")
    assert "Cancelled" in done.text and "No message like that" in done.text
    assert rest.get("/timers", topic="cancelled")["rows"] == []
    assert len(rest.get("/timers", topic=TOPIC)["rows"]) == 4


def test_the_delayed_messages_of_a_topic_come_in_pages(rest: Rest) -> None:
    """E-12: none is lost between two pages, however few of all messages are of the topic."""
    for number in range(12):
        rest.publish("rare" if number % 4 == 0 else "common", str(number), delay_ms=10 * HOUR_MS + number * 1000)
    found, after = [], ""
    while True:
        page = rest.get("/timers", topic="rare", limit=2, after=after)
        found += [row["due_ms"] for row in page["rows"]]
        if page["next"] is None:
            break
        after = page["next"]
    assert len(found) == 3 and found == sorted(set(found))
    assert len(rest.get("/timers", topic="rare", from_ms=found[1])["rows"]) == 2


def test_recurring_messages(visits: Visits, rest: Rest) -> None:
    """E-12: defined, shown, and ended; a wrong one is refused with what was typed."""
    form = visits.page("/new-recurring")
    wrong = visits.submit(form, "/new-recurring", 400, name="bad", cron="never", topic=TOPIC)
    assert "never" in wrong.alert and wrong.form(f"{ROOT}/new-recurring").fields["topic"] == TOPIC
    done = visits.submit(form, "/new-recurring", name="hourly", cron="@every 1h", topic=TOPIC, body="x", missed="none")
    assert "Created." in done.text and "hourly" in done.text
    (row,) = [row for row in rest.get("/recurring")["rows"] if row["name"] == "hourly"]
    assert (row["topic"], row["missed"], row["size"]) == (TOPIC, "none", 1)
    done = visits.submit(visits.page("/recurring/hourly/end"), "/recurring/hourly/end")
    assert "Ended" in done.text
    assert [row["name"] for row in rest.get("/recurring")["rows"]] == [RECURRING]


# -- leases and transactions ------------------------------------------------------------------------------------------


def test_leases(visits: Visits, rest: Rest) -> None:
    """E-08: groups, partitions and messages, as the API has them; each leads to the next."""
    (row,) = [row for row in rest.get("/leases", search=DEAD_TOPIC)["rows"] if row["group"] == DEAD_GROUP]
    assert (row["in_flight"], row["ready"]) == (3, 1)
    page = visits.page("/leases", search=DEAD_GROUP)
    assert page.links[DEAD_TOPIC] == f"{ROOT}/leases/{DEAD_GROUP}/{DEAD_TOPIC}"
    assert f"{ROOT}/leases/{DEAD_GROUP}/{DEAD_TOPIC}/0" in visits.page(f"/leases/{DEAD_GROUP}/{DEAD_TOPIC}").links.values()
    opened = visits.page(f"/leases/{DEAD_GROUP}/{DEAD_TOPIC}/0")
    assert opened.text.count("a consumer has it") == 3
    assert "no number" in visits.page(f"/leases/{DEAD_GROUP}/{DEAD_TOPIC}/x", 400).alert


def test_messages_in_line_for_their_key(visits: Visits, rest: Rest) -> None:
    """E-22: they are open, and have no times: they were never given."""
    rest.put("/topics/in-line", {"partitions": 1})
    rest.put("/groups/in-line", {"attributes": {"order": "key"}})
    rest.publish("in-line", "a", "b", ordering_key="k")
    rest.post("/groups/in-line/leases", {"topic": "in-line", "limit": 9})
    (row,) = rest.get("/leases", search="in-line")["rows"]
    assert (row["in_flight"], row["lined"]) == (1, 1)
    first, second = rest.get("/groups/in-line/leases/in-line/0")["rows"]
    assert (first["state"], second["state"], second["first_ms"], second["due_ms"]) == ("leased", "lined", 0, 0)
    opened = visits.page("/leases/in-line/in-line/0").text
    assert opened.count("in line for its key") == 1 and "1970" not in opened


def test_transactions_in_doubt(visits: Visits, rest: Rest, broker: BrokerProcess) -> None:
    """E-32: listed, shown, and decided, but only with a yes; then they are in doubt no longer."""
    with Producer(broker, "10.0.0.8@2") as producer:
        begun = producer.half(b"to be decided")
    path = f"/transactions/{begun.offset_id}"
    assert begun.offset_id in visits.page("/transactions").links
    page = visits.page(path)
    assert "Half message" in page.text
    assert "you are sure" in visits.submit(page, path, 400, outcome="commit").alert
    done = visits.submit(page, path, outcome="commit", sure="true")
    assert "Decided." in done.text
    wait_until(lambda: rest.ask("GET", path).status == 404, DEADLINE_S, "it is in doubt no longer")
    assert "to be decided" in [one["body"] for one in rest.get(f"/topics/{TOPIC}/newest")["rows"]]
    assert "no branch is prepared" in visits.page("/transactions", state="prepared").text.lower()
    visits.page("/transactions", 400, state="unheard")


# -- the broker -------------------------------------------------------------------------------------------------------


def test_settings(visits: Visits, rest: Rest, broker: BrokerProcess) -> None:
    """E-29, MQ-111: with their origin, found by name or value; one of the running broker is changed, the others stay."""
    page = visits.page("/settings", search="check_after_ms")
    assert "--check-after-ms" in page.text and "keep_hours" not in page.text
    by_value = visits.page("/settings", search=broker.address).text
    assert "listen" in by_value and "check_after_ms" not in by_value
    changed = visits.submit(visits.page("/settings"), "/settings", keep_hours="17")
    assert "Changed." in changed.text
    rows = {row["name"]: row for row in rest.get("/broker/settings")["rows"]}
    assert (rows["keep_hours"]["value"], rows["keep_hours"]["origin"]) == (17, "changed while it runs")
    assert rows["delete_hour"]["origin"] == "default"
    assert "keep_hours" in visits.submit(visits.page("/settings"), "/settings", 400, keep_hours="0").alert
    assert "console change" in broker.stderr()


def test_connections_and_log(visits: Visits) -> None:
    """E-19, E-32: who is connected, and what was logged, the newest first; both with a search."""
    connected = visits.page("/connections")
    assert "10.0.4.17@2811#archive" in connected.text
    assert "No connection has" in visits.page("/connections", search="10.99.").text
    log = visits.page("/logs", search="metaq.server")
    assert "recovered ending=" in log.text
    assert "No line is like that" in visits.page("/logs", search="no line has these words").text
    visits.page("/logs", 400, level="loud")


def test_charts(visits: Visits) -> None:
    """E-32: each has its numbers at the address that its page names; a figure that no chart has is not forgotten."""
    page = visits.page("/charts", minutes=15)
    shown = [attributes for _, attributes in page.elements if "data-chart" in attributes]
    assert [box["data-series"] for box in shown] == [chart.series for chart in CHARTS]
    numbers = visits.send("GET", shown[0]["data-chart"])
    assert (numbers.status, numbers.headers["content-type"]) == (200, "application/json")
    figures = json.loads(numbers.data)["figures"]
    assert figures.keys() == {line.figure for chart in CHARTS for line in chart.lines} == set(Figures._fields)
    assert json.loads(visits.send("GET", f"{ROOT}/charts/groups/nobody").data)["lag"] == []
    visits.page("/charts", 400, minutes=1000)


def test_the_cluster(visits: Visits, broker: BrokerProcess) -> None:
    """MQ-104: a broker alone is its own cluster; it has no replica to hand over to."""
    page = visits.page("/cluster")
    assert broker.address in page.text and "this one" in page.text and "answers" in page.text
    for order in ("hand-over", "promote", "demote"):
        assert "accepts no slaves" in visits.page(f"/cluster/{order}", 404).alert
    assert "no users" in visits.page("/users").text


def test_who_only_reads(tmp_path: Path) -> None:
    """E-05, MQ-116: a reader sees figures, and neither log nor users; no form changes anything; an administrator sees all."""
    flags = ("--users-file", str(write_users(tmp_path / "users.yaml")), "--replication-listen", "127.0.0.1:0")
    with BrokerProcess(tmp_path / "data", *flags) as broker, Rest(broker.http, ADMIN) as rest:
        rest.put("/topics/t", {"partitions": 1})
        (letter,) = dead_letters(rest, "t", "g", ["x"])
        rest.publish("t", "later", delay_ms=HOUR_MS)
        with Visits(broker.http, READER) as reader:
            looked = ("/charts", "/timers", "/leases", "/transactions", "/connections", "/settings", "/cluster")
            for path in (*looked, "/dead-letters/g"):
                reader.page(path)
            for path in ("/logs", "/users", "/stacks"):
                assert f"{READER.name} may not administer this broker" in reader.page(path, 403).alert
            box = {f"letter.{letter['offset_id']}": "true"}
            page = reader.page("/dead-letters/g")
            assert "may not" in reader.submit(page, "/dead-letters/g", 403, do="discard", sure="true", **box).alert
            assert "may not" in reader.submit(reader.page("/settings"), "/settings", 403, keep_hours="9").alert
            for order, fields in (("hand-over", {"replica": "2"}), ("promote", {}), ("demote", {"master": "127.0.0.1:1"})):
                path = f"/cluster/{order}"
                assert "may not administer" in reader.submit(reader.page(path), path, 403, **fields).alert
            assert not [form for form in reader.page("/timers").forms if form.method == "post" and "timers" in form.action]
            assert rest.get("/groups/g")["dead_letters"] == 1
        with Visits(broker.http, ADMIN) as admin:
            users = admin.page("/users")
            assert "PUB|CREATE" in users.text and "administrator" in users.text
            assert all(secret.secret not in users.data.decode() for secret in (ADMIN, READER, WRITER))
            assert f"user={READER.name}" in admin.page("/logs", search="login").text or "api change" in admin.page("/logs").text
