"""Changes by forms, without scripts: what they do, what they show first, and what refuses them."""

import pytest

from metaq.server.console.visit import ROOT
from metaq.server.console.visitors import TOKEN_FIELD
from tests.support.broker import BrokerProcess
from tests.support.console import FORM, Visits
from tests.support.rest import Rest


def test_a_topic_is_made_changed_and_deleted(visits: Visits, rest: Rest) -> None:
    """MQ-104: a box that is not checked says so; a deletion needs the name."""
    made = visits.submit(visits.page("/new-topic"), "/new-topic", topic="made", partitions="3", ordered="true")
    assert "Created." in made.text
    assert [rest.get("/topics/made")[name] for name in ("partitions", "writable", "ordered")] == [3, True, True]
    settings = visits.page("/topics/made/settings")
    assert settings.form(f"{ROOT}/topics/made/settings").fields["ordered"] == "true"
    visits.submit(settings, "/topics/made/settings", writable="false", partitions="4")
    assert [rest.get("/topics/made")[name] for name in ("partitions", "writable", "ordered")] == [4, False, True]
    rest.put("/topics/made", {"partitions": 2})
    visits.submit(visits.page("/topics/made/settings"), "/topics/made/settings", dedupe_window_ms="1000")
    assert [rest.get("/topics/made")[name] for name in ("partitions", "read_partitions", "dedupe_window_ms")] == [2, 4, 1000]
    asked = visits.page("/topics/made/delete")
    assert "type made to confirm" in visits.submit(asked, "/topics/made/delete", 400, name="mad").alert
    assert rest.get("/topics/made")["partitions"] == 2
    assert "Deleted." in visits.submit(asked, "/topics/made/delete", name="made").text
    assert rest.refused(404, "GET", "/topics/made")["code"] == 17


def test_a_form_that_is_refused_keeps_what_was_typed(visits: Visits, rest: Rest) -> None:
    """MQ-104: with the sentence that other protocols have."""
    form = visits.page("/new-topic")
    refused = visits.submit(form, "/new-topic", 400, topic="not good", partitions="7")
    assert "not good" in refused.alert
    fields = refused.form(f"{ROOT}/new-topic").fields
    assert (fields["topic"], fields["partitions"]) == ("not good", "7")
    assert "partitions" in visits.submit(form, "/new-topic", 400, topic="good", partitions="x").alert
    rest.put("/topics/there", {"partitions": 1})
    assert "exists already" in visits.submit(form, "/new-topic", 400, topic="there").alert


def test_a_message_is_published(visits: Visits, rest: Rest) -> None:
    """MY-032: with keys, tag, properties and a partition; then it is shown. A delayed one is not there yet."""
    rest.put("/topics/inbox", {"partitions": 3})
    form = visits.page("/topics/inbox/publish")
    shown = visits.submit(
        form,
        "/topics/inbox/publish",
        body="line one\r\nline two",
        keys="k1 k2",
        tag="paid",
        properties="a=1\nb = two=2",
        partition="2",
    )
    assert "Published." in shown.text
    [row] = rest.get("/topics/inbox/newest")["rows"]
    assert (row["body"], row["keys"], row["tag"], row["partition"]) == ("line one\nline two", ["k1", "k2"], "paid", 2)
    assert (row["properties"]["a"], row["properties"]["b"]) == ("1", "two=2")
    assert "when its time comes" in visits.submit(form, "/topics/inbox/publish", body="later", delay_ms="3600000").text
    assert len(rest.get("/timers")["rows"]) == 1
    assert "name=value" in visits.submit(form, "/topics/inbox/publish", 400, properties="nonsense").alert
    assert len(rest.get("/topics/inbox/newest")["rows"]) == 1


def test_a_group_is_made_changed_and_deleted(visits: Visits, rest: Rest) -> None:
    """MQ-111: its settings, and those that are not the default."""
    visits.submit(visits.page("/new-group"), "/new-group", group="team", retry_max_times="3", order="key")
    group = rest.get("/groups/team")
    assert (group["retry_max_times"], group["attributes"], group["consume_enabled"]) == (3, {"order": "key"}, True)
    settings = visits.page("/groups/team/settings")
    visits.submit(settings, "/groups/team/settings", order="", consume_enabled="false")
    group = rest.get("/groups/team")
    assert (group["retry_max_times"], group["attributes"], group["consume_enabled"]) == (3, {}, False)
    visits.submit(visits.page("/groups/team/delete"), "/groups/team/delete", name="team")
    assert rest.refused(404, "GET", "/groups/team")["code"] == 26


def test_a_reset_is_shown_first(visits: Visits, rest: Rest) -> None:
    """MQ-111: the preview changes nothing; then all partitions are where it says."""
    rest.put("/topics/moves", {"partitions": 2})
    rest.put("/groups/mover", {})
    rest.publish("moves", *map(str, range(10)), partition=1)
    rest.post("/groups/mover/offsets", {"topic": "moves", "offsets": {"0": 0, "1": 8}})
    preview = visits.page("/groups/mover/reset", topic="moves", place="offset", offset="3")
    assert "consumes 5 messages again" in preview.text
    assert [row["committed"] for row in rest.get("/groups/mover/lag")["partitions"]] == [0, 8]
    assert "The offsets were reset." in visits.submit(preview, "/groups/mover/reset").text
    assert [row["committed"] for row in rest.get("/groups/mover/lag")["partitions"]] == [0, 3]
    assert "skips 7 messages" in visits.page("/groups/mover/reset", topic="moves", place="last").text
    assert "type the time" in visits.page("/groups/mover/reset", topic="moves", place="time").alert
    assert "is a number" in visits.page("/groups/mover/reset", topic="moves", place="offset", offset="x").alert


# -- who may send a form ----------------------------------------------------------------------------------------------


def test_a_change_needs_the_token_of_its_page(visits: Visits, rest: Rest) -> None:
    """E-05: no, a wrong, or another process's token: nothing is changed, and the log has no such line."""
    for token in (None, "", "0" * 64, "é"):
        fields = {"topic": "forged", "partitions": "1"} | ({} if token is None else {TOKEN_FIELD: token})
        answer = visits.send("POST", f"{ROOT}/new-topic", fields)
        assert (answer.status, "load its page again" in answer.alert) == (403, True), token
    assert rest.refused(404, "GET", "/topics/forged")["code"] == 17


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
        {"Host": "evil.example:8124"},
    ],
)
def test_pages_of_another_site_change_nothing(visits: Visits, rest: Rest, headers: dict[str, str]) -> None:
    """E-05: even with the token."""
    fields = {**visits.page("/new-topic").form(f"{ROOT}/new-topic").fields, "topic": "evil"}
    assert visits.send("POST", f"{ROOT}/new-topic", fields, headers).status == 403
    assert rest.refused(404, "GET", "/topics/evil")["code"] == 17


def test_a_link_from_another_site_may_be_followed(visits: Visits) -> None:
    """E-05: it shows a page; what another site loads into its own, and another name of this broker, do not."""
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert visits.send("GET", f"{ROOT}/topics", headers=link).status == 200
    assert visits.send("GET", f"{ROOT}/topics", headers={**link, "Host": "evil.example"}).status == 403
    for mode in ("no-cors", "cors"):
        loaded = visits.send("GET", f"{ROOT}/topics", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": mode})
        assert loaded.status == 403


def test_only_forms_are_taken(visits: Visits) -> None:
    """E-05: no JSON, nothing over the limit, and not a million fields."""
    where = f"{ROOT}/new-topic"
    assert visits.send("POST", where, {}, {"Content-Type": "application/json"}).status == 415
    fields = {str(number): "" for number in range(1001)}
    assert "1000 fields at most, and this one 1,001" in visits.send("POST", where, fields).alert
    assert visits.send("POST", where, None, {"Content-Type": FORM, "Content-Length": str(1 << 40)}).status == 413


def test_changes_are_in_the_log(broker: BrokerProcess, visits: Visits) -> None:
    """E-05: who, from where, and what; looking and what is refused are not."""
    before = broker.stderr()
    form = visits.page("/new-topic")
    visits.submit(form, "/new-topic", topic="audited")
    visits.submit(form, "/new-topic", 400, topic="audited")
    lines = [line for line in broker.stderr().removeprefix(before).splitlines() if "console change" in line]
    assert len(lines) == 1
    assert "user=anonymous address=127.0.0.1 operation=create_topic path=" in lines[0]
