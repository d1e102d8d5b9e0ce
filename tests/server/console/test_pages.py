"""Pages that only show: each answers, whatever names, keys and bodies say, and under the rules that a browser enforces."""

import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import pytest

from metaq.server.console.assets import FOLDER
from metaq.server.console.routes import SECTIONS
from metaq.server.console.site import BOUNDS
from metaq.server.console.visit import ROOT
from tests.server.console.planted import named_in, shown_paths
from tests.support.broker import SOCKET_TIMEOUT_S, BrokerProcess, wait_until
from tests.support.console import ShownPage, Visits
from tests.support.consumer import Consumer, subscription
from tests.support.rest import Rest, named

HOSTILE: Final = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'</pre></textarea></td>{{7*7}}&amp;"
TOPIC: Final = "%a%22onload|t"
"""As hostile as a name may be."""
GROUP: Final = "%3Cg%3E"
PER_PAGE: Final = 50
DEADLINE_S: Final = 60.0
HANDLERS: Final = ("on", "style", "srcdoc")
TAGS: Final = {"script", "style", "iframe", "object", "embed", "base"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with hostile content: one topic with messages, and a group with a connected member."""
    folder: Path = tmp_path_factory.mktemp("pages")
    with BrokerProcess(folder / "data") as broker, Rest(broker.http) as rest, Consumer(broker, GROUP, HOSTILE) as consumer:
        rest.put(f"/topics/{named(TOPIC)}", {"partitions": 2})
        rest.put(f"/groups/{named(GROUP)}", {})
        rest.publish(TOPIC, HOSTILE, keys=["k<b>"], tag="<i>tag</i>", properties={"p<u>": HOSTILE})
        consumer.beat(subscription(TOPIC, "<i>x"))
        yield broker


def newest_id(broker: BrokerProcess, topic: str = TOPIC) -> str:
    with Rest(broker.http) as rest:
        return str(rest.get(f"/topics/{named(topic)}/newest")["rows"][0]["offset_id"])


def check_harmless(page: ShownPage) -> None:
    """No element of a page can run what the page did not bring, and no attribute can."""
    for tag, attributes in page.elements:
        assert tag not in TAGS or (tag == "script" and attributes.keys() == {"src", "defer"}), (tag, attributes)
        assert tag != "script" or attributes["src"].startswith(f"{ROOT}/static/")
        assert not [name for name in attributes if name.startswith(HANDLERS)], (tag, attributes)
        assert not attributes.get("href", "").lower().startswith(("javascript:", "data:text")), attributes
        assert tag != "img" or attributes["src"].startswith(f"{ROOT}/static/"), attributes


def every_page(broker: BrokerProcess) -> list[str]:
    """The paths of all pages, with names that this broker has."""
    names = {"topic": named(TOPIC), "group": named(GROUP), "offset_id": newest_id(broker)}
    return [path.format(**names) for path in shown_paths() if named_in(path) <= names.keys()]


def test_every_page_answers_and_is_harmless(broker: BrokerProcess, visits: Visits) -> None:
    """MQ-104, E-05: with hostile names, keys, tags, properties, bodies, client ids and filters."""
    for path in every_page(broker):
        page = visits.page(path)
        check_harmless(page)
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy, path
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["referrer-policy"] == "same-origin"
        assert page.headers["cache-control"] == "no-store"
        assert [tag for tag, _ in page.elements].count("h1") == 1, path


def test_hostile_content_is_shown_as_it_is(broker: BrokerProcess, visits: Visits) -> None:
    """E-05: escaped once, and not twice."""
    message = visits.page(f"/messages/{newest_id(broker)}", **{"as": "text"})
    for shown in (HOSTILE, "k<b>", "<i>tag</i>", "p<u>", TOPIC):
        assert shown in message.text, shown
    assert HOSTILE.split()[0] in visits.page(f"/topics/{named(TOPIC)}/messages").text
    group = visits.page(f"/groups/{named(GROUP)}")
    assert HOSTILE in group.text and "<i>x" in group.text


@pytest.mark.parametrize("path", ["/topics?search={}", "/groups?search={}", "/search?topic={}&key={}", "/search?id={}", "/{}"])
def test_what_an_address_says_is_escaped(visits: Visits, path: str) -> None:
    """E-05: also in the page of an error."""
    page = visits.send("GET", f"{ROOT}{path.replace('{}', named(HOSTILE))}")
    assert page.status in (200, 404)
    check_harmless(page)


def test_an_address_cannot_make_a_notice(visits: Visits) -> None:
    """E-05: only the sentences that there are, with a number."""
    assert "Created." in visits.page("/topics", done="created").text
    for done, count in ((HOSTILE, "1"), ("created", HOSTILE), ("{count}", "1")):
        page = visits.page("/topics", done=done, count=count)
        assert not [element for element in page.elements if element[1].get("role") == "status"]


def test_bodies_have_forms(broker: BrokerProcess, visits: Visits) -> None:
    """MQ-112: JSON with indents, text, bytes; and all of it as a file that no browser opens."""
    with Rest(broker.http) as rest:
        for body, form, shown in (
            ({"body": '{"b":[1,2]}'}, "", '{\n  "b": [\n    1,\n    2\n  ]\n}'),
            ({"body": '{"b":[1,2]}'}, "hex", "00000000  7b 22 62 22"),
            ({"body": "{no json"}, "", "{no json"),
            (
                {"body": '{"n":123456789012345678901234567890,"a":1,"a":[ ]}'},
                "",
                '"n": 123456789012345678901234567890, "a": 1, "a": []',
            ),
            ({"body": '["\\u4e2d, \\" [",{}]'}, "", '[ "中, \\" [", {} ]'),
            ({"body_base64": "AP8A"}, "", "00 ff 00"),
            ({"body_base64": "AP8A"}, "text", "�"),
        ):
            sent = rest.post("/topics/bodies/messages", body)
            page = visits.page(f"/messages/{sent['offset_id']}", **({"as": form} if form else {}))
            assert " ".join(shown.split()) in page.text, (body, form)
            file = visits.send("GET", f"{ROOT}/messages/{sent['offset_id']}/body")
            assert (file.headers["content-type"], file.status) == ("application/octet-stream", 200)
            assert file.headers["content-disposition"].startswith("attachment")
            assert file.data == (body["body"].encode() if "body" in body else b"\x00\xff\x00")


def test_a_large_body_is_cut(broker: BrokerProcess, visits: Visits) -> None:
    """MQ-112: the page says so, and the file has all."""
    large = json.dumps({"x": "é" * 150_000})
    with Rest(broker.http) as rest:
        sent = rest.post("/topics/bodies/messages", {"body": large})
    page = visits.page(f"/messages/{sent['offset_id']}")
    assert "Only its begin is shown" in page.text and len(page.data) < 200_000
    assert visits.send("GET", f"{ROOT}/messages/{sent['offset_id']}/body").data.decode() == large


def test_lists_come_in_pages(broker: BrokerProcess, visits: Visits) -> None:
    """MQ-104: with a search; the page after the last has no next one."""
    with Rest(broker.http) as rest:
        for number in range(PER_PAGE + 3):
            rest.put(f"/topics/many-{number:03}", {"partitions": 1})
            rest.put(f"/groups/many-{number:03}", {})
    for what in ("topics", "groups"):
        first = visits.page(f"/{what}", search="many")
        second = visits.send("GET", first.links["Next page"])
        names = [name for page in (first, second) for name in page.links if name.startswith("many-")]
        assert names == [f"many-{number:03}" for number in range(PER_PAGE + 3)]
        assert "Next page" not in second.links and "First page" in second.links
        assert [name for name in visits.page(f"/{what}", search="many-042").links if name.startswith("many")] == ["many-042"]


def test_messages_from_any_place(broker: BrokerProcess, visits: Visits) -> None:
    """MQ-112: the newest of all partitions, from an offset, from a time, and on from there."""
    with Rest(broker.http) as rest:
        rest.put("/topics/places", {"partitions": 2})
        sent = [rest.post("/topics/places/messages", {"body": f"m{number}", "partition": number % 2}) for number in range(140)]
        (at_60,) = rest.get("/topics/places/partitions/0/messages", offset=30, limit=1)["messages"]
    newest = visits.page("/topics/places/messages")
    assert newest.text.index("m139") < newest.text.index("m138") < newest.text.index("m90") and "m89" not in newest.text.split()
    page = visits.page("/topics/places/messages", partition=0, offset=10)
    assert "m20" in page.text.split() and "m18" not in page.text.split() and "m118" in page.text.split()
    assert "m120" in visits.send("GET", page.links["Later"]).text.split()
    assert "m0" in visits.send("GET", page.links["Earlier"]).text.split()
    when = visits.page(f"/messages/{at_60['offset_id']}")
    assert sent[60]["offset_id"] == at_60["offset_id"] and "m60" in when.text.split()
    assert "choose the partition" in visits.page("/topics/places/messages", 400, time="2026-01-31T12:00").alert
    assert "is no time" in visits.page("/topics/places/messages", 400, partition=0, time="x").alert
    assert "m0" in visits.page("/topics/places/messages", partition=0, time="2020-01-31T12:00").text.split()
    assert "not one of them" in visits.page("/topics/places/messages", 400, partition=2).alert


def test_who_consumed_a_message(broker: BrokerProcess, visits: Visits) -> None:
    """MQ-111: found by key, by the sender's id and by the broker's."""
    with Rest(broker.http) as rest:
        rest.put("/topics/tracked", {"partitions": 1})
        rest.put("/groups/ahead", {})
        rest.put("/groups/late", {})
        (sent,) = rest.publish("tracked", "x", keys=["order-7"])
        rest.publish("tracked", "y")
        rest.post("/groups/ahead/offsets", {"topic": "tracked", "offsets": {"0": 1}})
        rest.post("/groups/late/offsets", {"topic": "tracked", "offsets": {"0": 0}})
    for query in ({"key": "order-7"}, {"id": sent["id"]}):
        found = visits.page("/search", topic="tracked", **query)
        assert found.links["0"] == f"{ROOT}/messages/{sent['offset_id']}"
    assert visits.page("/search", id=sent["offset_id"]).links["0"] == f"{ROOT}/messages/{sent['offset_id']}"
    page = visits.page(f"/messages/{sent['offset_id']}")
    assert "ahead consumed late not yet: no consumer is connected" in page.text
    assert "No message of tracked" in visits.page("/search", topic="tracked", key="nothing").text
    assert "name it, too" in visits.page("/search", key="order-7").alert


def test_why_a_group_does_not_consume(broker: BrokerProcess, visits: Visits) -> None:
    """MQ-111, MQ-116: the checks of the command line, each with advice."""
    with Rest(broker.http) as rest:
        rest.put("/topics/waiting", {"partitions": 1})
        rest.put("/groups/absent", {"consume_enabled": False})
        rest.post("/groups/absent/offsets", {"topic": "waiting", "offsets": {"0": 0}})
        rest.publish("waiting", "x")
        found = {row["check"]: row for row in rest.get("/groups/absent/diagnosis")["rows"]}
    assert (found["consumers"]["level"], found["enabled"]["level"]) == ("problem", "problem")
    text = visits.page("/groups/absent/why").text
    assert "no consumer is connected" in text and "metaq group update absent --consume" in text
    assert "no consumer is connected, and messages wait: absent" in visits.page("/").text


def test_files_never_change_under_their_address(visits: Visits) -> None:
    """MQ-104: browsers keep them for ever; others than those of pages are not there."""
    page = visits.page("/topics")
    addresses = [
        given.get("src") or given.get("href") or "" for tag, given in page.elements if tag in ("script", "link", "img")
    ]
    assert len(addresses) >= 4
    for address in addresses:
        file = visits.send("GET", address)
        assert (file.status, file.headers["cache-control"]) == (200, "public, max-age=31536000, immutable")
        assert file.data == (FOLDER / address.rpartition("/")[2]).read_bytes()
        digest = address.split("/")[-2]
        assert visits.send("GET", address.replace(digest, "0" * len(digest))).status == 404
    licence = addresses[0].rpartition("/")[0] + "/htmx.LICENSE"
    assert visits.send("GET", licence).status == 404


def test_the_way_in(visits: Visits) -> None:
    """MQ-104: from the address of the port to the first page; what is not there is a page, too."""
    first = visits.send("GET", "/")
    assert (first.status, first.headers["location"]) == (303, f"{ROOT}/")
    overview = visits.page("/")
    assert {section.title for lines in SECTIONS.values() for section in lines} <= overview.links.keys()
    assert "there is no such page" in visits.page("/nothing", 404).alert
    assert "does not exist" in visits.page("/topics/nothing", 404).alert
    assert visits.send("DELETE", f"{ROOT}/topics").status == 405
    assert visits.send("HEAD", f"{ROOT}/").status in (200, 405)


def test_a_busy_console_keeps_nothing_else_waiting(broker: BrokerProcess, visits: Visits) -> None:
    """E-01: with as many tails as it takes, metrics, health and the API answer; when one ends, pages do again."""
    host, _, port = broker.http.rpartition(":")
    with Rest(broker.http) as rest, ExitStack() as stack:
        rest.put("/topics/busy", {"partitions": 1})
        tails = []
        for _ in range(BOUNDS.calls):
            connection = http.client.HTTPConnection(host, int(port), timeout=SOCKET_TIMEOUT_S)
            stack.enter_context(closing(connection))
            connection.request("GET", f"{ROOT}/topics/busy/tail/events")
            tails.append(connection.getresponse())
        assert {tail.status for tail in tails} == {200}
        answer = visits.send("GET", f"{ROOT}/topics")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert [visits.send("GET", path).status for path in ("/healthz", "/readyz", "/metrics")] == [200] * 3
        assert rest.get("/broker")["ready"]
        rest.publish("busy", "<b>all</b>")
        for tail in tails:
            lines = iter(tail.readline, b"")
            assert b"&lt;b&gt;all" in next(line for line in lines if b"preview" in line)
    with Rest(broker.http) as rest:

        def some_have_ended() -> bool:
            rest.publish("busy", "only who writes to a tail learns that nobody reads it")
            return visits.send("GET", f"{ROOT}/topics").status == 200

        wait_until(some_have_ended, DEADLINE_S, "the tails have ended", 0.1)


def test_metrics_and_health_stay(visits: Visits) -> None:
    """E-01: where they were."""
    assert [visits.send("GET", path).status for path in ("/healthz", "/readyz", "/metrics")] == [200] * 3
    assert visits.send("GET", "/other").status == 404
