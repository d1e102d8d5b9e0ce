"""Dead letters on the command line: listed, sent again, and discarded."""

import json

import pytest

from metaq.client import Client, ConsumeFrom, ReceivedMessage
from metaq.errors import BadRequest
from tests.support.broker import BrokerProcess, wait_until
from tests.support.cli import Cli
from tests.support.rest import Rest

DEADLINE_S = 60.0
FIRST = ConsumeFrom.FIRST


def dead_letters(cli: Cli, client: Client, topic: str, group: str, count: int, before: int = 0) -> list[str]:
    """Have a group that has so many dead letters give up some more messages; their ids."""

    def fail(message: ReceivedMessage) -> None:
        raise ValueError("no")

    cli.run("topic", "create", topic)
    with client.listen(topic, group, fail, max_reconsume_times=0, consume_from=FIRST):
        ids = [
            client.producer().send(topic, b"%d" % number, tag="a", keys=[f"k{number}"], properties={"p": "v"}).id
            for number in range(count)
        ]
        wait_until(
            lambda: {row["group"]: row["messages"] for row in cli.rows("dlq", "list")}.get(group) == before + count,
            DEADLINE_S,
            "the dead letters",
        )
    return ids


def test_dead_letters_are_listed_and_sent_again_to_their_topic(cli: Cli, client: Client) -> None:
    """E-04, SG-074: as new messages that lead back to the old ones; once, unless told otherwise."""
    ids = dead_letters(cli, client, "invoices", "mailers", 3)
    assert sorted(row["id"] for row in cli.rows("dlq", "show", "mailers")) == ids  # several threads gave them up
    preview = cli.run("dlq", "replay", "mailers")
    assert "would send 3 of 3" in preview.stdout and "--yes" in preview.stderr
    assert len(cli.rows("message", "query", "invoices", "--from", "1h")) == 3

    (sent,) = cli.rows("dlq", "replay", "mailers", "--id", ids[1], "--yes")
    assert sent["new_id"] not in ids
    (found,) = cli.rows("message", "query", "invoices", "--key", ids[1])
    assert (found["id"], found["body"], found["tag"]) == (sent["new_id"], "1", "a")
    assert found["keys"] == ["k1", ids[1]]
    assert found["properties"]["DLQ_ORIGIN_MESSAGE_ID"] == ids[1]
    assert found["properties"]["METAQ_DEAD_LETTER"].startswith("mailers@")
    assert found["properties"]["p"] == "v"
    assert found["reconsume_times"] == 0

    rest = cli.run("dlq", "replay", "mailers", "--yes")
    assert f"left out {ids[1]} to invoices: it was sent again 1 time before" in rest.stdout
    assert "sent 2 of 3" in rest.stdout
    assert len(cli.rows("message", "query", "invoices", "--from", "1h")) == 6
    assert [row["sent_before"] for row in cli.rows("dlq", "replay", "mailers", "--again")] == [1, 1, 1]


def test_a_dead_letter_goes_to_its_group_alone(cli: Cli, client: Client) -> None:
    """SG-074, E-07: under an id of its own, so that no window takes it for a duplicate, and no other group sees it."""
    ids = dead_letters(cli, client, "letters", "senders", 1)
    healed: list[str] = []
    with client.listen("letters", "senders", lambda message: healed.append(message.id), consume_from=FIRST):
        replayed = cli.rows("dlq", "replay", "senders", "--to", "group", "--yes")
        wait_until(lambda: healed == [row["new_id"] for row in replayed], DEADLINE_S, "it comes once more")
    assert [row["id"] for row in replayed] == ids
    assert healed != ids
    assert len(cli.rows("message", "query", "letters", "--from", "1h")) == 1


def test_a_dead_letter_whose_topic_is_gone(cli: Cli, client: Client) -> None:
    """E-04, SG-074: it keeps no other one from being sent to its topic, and its group can have it again."""
    lost = dead_letters(cli, client, "gone", "heirs", 1)
    rest = dead_letters(cli, client, "kept", "heirs", 1, before=1)
    cli.run("topic", "delete", "gone", "--yes")
    shown = cli.run("dlq", "replay", "heirs", code=1)
    assert f"left out {lost[0]} to gone: there is no such topic any more; --to group" in shown.stdout
    assert "would send 1 of 2" in shown.stdout
    rows = cli.rows("dlq", "replay", "heirs", "--yes", code=1)
    assert {row["id"]: (row["sent"], row["sent_before"]) for row in rows} == {lost[0]: (False, None), rest[0]: (True, 0)}
    assert [row["sent"] for row in cli.rows("dlq", "replay", "heirs", "--to", "group", "--id", lost[0], "--yes")] == [True]


def test_chosen_dead_letters_are_discarded(cli: Cli, client: Client, broker: BrokerProcess) -> None:
    """E-09: only with --yes; one, several, then all that are left; nothing shows, counts or sends them again."""
    ids = dead_letters(cli, client, "parcels", "carriers", 6)

    def left() -> list[str]:
        return sorted(row["id"] for row in cli.rows("dlq", "show", "carriers"))

    preview = cli.run("dlq", "discard", "carriers", "--id", ids[1])
    assert f"would discard {ids[1]} of parcels" in preview.stdout and "--yes" in preview.stderr
    assert left() == ids
    assert cli.rows("dlq", "discard", "carriers", "--id", ids[1], "--yes") == [
        {"id": ids[1], "topic": "parcels", "discarded": True}
    ]
    cli.run("dlq", "discard", "carriers", "--id", ids[2], "--id", ids[4], "--yes")
    assert left() == [ids[0], ids[3], ids[5]]
    gone = cli.run("dlq", "discard", "carriers", "--id", ids[1], "--yes", code=1)
    assert f"has the id {ids[1]}" in gone.stderr
    check_counts(cli, broker, "carriers", 3)
    assert "would send 3 of 3" in cli.text("dlq", "replay", "carriers")
    assert "would discard 3 dead letters" in cli.text("dlq", "discard", "carriers")
    assert "discarded 3 dead letters" in cli.text("dlq", "discard", "carriers", "--yes")
    check_counts(cli, broker, "carriers", 0)
    assert "has no dead letters" in cli.run("dlq", "show", "carriers", code=1).stderr
    assert len(cli.rows("message", "query", "parcels", "--from", "1h")) == 6
    assert "dead letters" not in cli.text("group", "delete", "carriers", "--yes")


def check_counts(cli: Cli, broker: BrokerProcess, group: str, count: int) -> None:
    """All that count a group's dead letters leave out what was discarded."""
    assert cli.row("group", "show", group)["dead_letters"] == count
    assert cli.row("group", "delete", group)["dead_letters"] == count
    assert {row["group"]: row["messages"] for row in cli.rows("dlq", "list")}.get(group, 0) == count
    found = [json.loads(line) for line in cli.run_any("why-not-consuming", group, "--watch", "0", "--json").stdout.splitlines()]
    said = [row["found"] for row in found if row["check"] == "dead letters" and row["level"] == "warning"]
    assert said == ([f"{count} messages became dead letters"] if count else [])
    with Rest(broker.http) as rest:
        assert rest.get(f"/groups/{group}")["dead_letters"] == count


def test_what_comes_meanwhile_is_not_discarded(cli: Cli, client: Client) -> None:
    """E-09: all are those that were there; a later one stays, also when others were discarded by another program since."""
    dead_letters(cli, client, "visits", "guests", 2)
    admin = client.admin()
    seen = admin.dead_letters("guests")
    admin.discard_dead_letters(seen[:1])
    later = dead_letters(cli, client, "visits", "guests", 1, before=1)
    admin.discard_dead_letters(seen)
    assert [letter.id for letter in admin.dead_letters("guests")] == later
    with pytest.raises(BadRequest, match="not a dead letter"):
        admin.discard_dead_letters(admin.query_by_id("visits", later[0]))


def test_no_dead_letters(cli: Cli) -> None:
    """E-04: exit code 1, and who has none, or does not exist."""
    cli.run("group", "update", "healthy")
    for command in ("show", "replay", "discard"):
        assert "the group healthy has no dead letters" in cli.run("dlq", command, "healthy", code=1).stderr
        assert "no broker knows the group heathy; did you mean healthy?" in cli.run("dlq", command, "heathy", code=1).stderr
