"""Acks that come together: each is answered as if it had come alone, and those of one pop are one event."""

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.engine.tables.groups import Group
from metaq.leases.events import EVENTS, Acked, decode_events
from metaq.protocol.record import decode_record
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.leases.receipts import Receipt
from metaq.protocol.remoting.signature import Credentials
from metaq.server.access.authentication import Authentication
from metaq.server.access.permissions import Principal
from metaq.store.files.filecache import read_here
from tests.server.remoting.test_pops import GROUP, INVISIBLE_MS, TOPIC, Consumer, bodies
from tests.support.inprocess import Remoting
from tests.support.users import write_users

MESSAGES: Final = 8
SECRET: Final = "a secret of mine"

Fields = dict[str, str]


def fields_of(receipt: Receipt) -> Fields:
    return {
        "consumerGroup": GROUP,
        "topic": TOPIC,
        "queueId": str(receipt.queue),
        "extraInfo": str(receipt),
        "offset": str(receipt.offset),
    }


CHANGES: Final[Mapping[str, Callable[[Fields], Fields]]] = {
    "none": lambda fields: fields,
    "offset": lambda fields: {**fields, "offset": "7"},
    "leading zero": lambda fields: {
        **fields,
        "offset": "0" + fields["offset"],
        "extraInfo": f"{fields['extraInfo'].rpartition(' ')[0]} 0{fields['offset']}",
    },
    "other offset": lambda fields: {
        **fields,
        "offset": "4096",
        "extraInfo": fields["extraInfo"].rpartition(" ")[0] + " 4096",
    },
    "no offset": lambda fields: {name: value for name, value in fields.items() if name != "offset"},
    "no receipt": lambda fields: {**fields, "extraInfo": "0 1 2"},
    "log offset": lambda fields: {**fields, "extraInfo": fields["extraInfo"] + " 4096"},
    "queue": lambda fields: {**fields, "queueId": "1"},
    "blank": lambda fields: {**fields, "queueId": f" {fields['queueId']}"},
    "group": lambda fields: {**fields, "consumerGroup": "others"},
    "topic": lambda fields: {**fields, "topic": "unknown"},
    "token": lambda fields: {**fields, "extraInfo": re.sub(r"^(\S+ \S+ \S+) \S+", r"\1 4711", fields["extraInfo"])},
}


@pytest.fixture
def consumer(tmp_path: Path) -> Iterator[Consumer]:
    made = Consumer(tmp_path)
    yield made
    made.parts.close()


def acked(consumer: Consumer, requests: list[Fields]) -> list[int]:
    """Send acks in one piece; return the codes of the answers, in the order of the requests."""
    consumer.client.send_together(Request.ACK_MESSAGE, requests)
    consumer.parts.end_turn()
    return [answer.code for answer in sorted(consumer.client.answers(), key=lambda answer: answer.opaque)]


def acks_in_log(consumer: Consumer) -> list[Acked]:
    """Return the acks in the records of the leases, in their order."""
    store = consumer.parts.store
    records = [each for each in store.records(store.queues[EVENTS], 0, 1 << 20, read_here) if each is not None]
    bodies = [decode_record(each.buffer[each.at : each.at + each.size]).body for each in records]
    return [event for body in bodies for _, event in decode_events(body).events if isinstance(event, Acked)]


def test_acks_of_one_pop_are_one_event(consumer: Consumer) -> None:
    """Whatever their order, and those that were done before count as done."""
    consumer.put(*map(str, range(40)))
    receipts = [receipt for _, receipt in consumer.popped(32)]
    requests = [fields_of(receipt) for receipt in receipts]
    assert acked(consumer, [requests[3], requests[2], requests[31]]) == [Response.SUCCESS] * 3
    assert acked(consumer, requests[5:30] + requests[2:4]) == [Response.SUCCESS] * 27
    assert len(acks_in_log(consumer)) == 2
    consumer.parts.advance(INVISIBLE_MS / 1000)
    assert bodies(consumer.popped()[:5]) == ["0", "1", "4", "30", "32"]


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(0, 2 * MESSAGES - 1), st.sampled_from(["none"] * len(CHANGES) + list(CHANGES))),
        min_size=1,
        max_size=2 * MESSAGES,
    )
)
def test_acks_that_come_together_mean_what_they_mean_alone(drawn: list[tuple[int, str]]) -> None:
    """Acks of two pops, half of whose messages were given again, and acks with all kinds of errors."""
    found = []
    for together in (True, False):
        with tempfile.TemporaryDirectory() as data:
            consumer = Consumer(Path(data))
            if not together:
                consumer.parts.endpoint.runs.clear()
            consumer.put(*map(str, range(2 * MESSAGES)))
            receipts = [receipt for _ in range(2) for _, receipt in consumer.popped(MESSAGES, 0)]
            consumer.parts.advance(INVISIBLE_MS / 1000)
            consumer.popped(MESSAGES, 0)
            requests = [CHANGES[change](fields_of(receipts[index])) for index, change in drawn]
            codes = acked(consumer, requests) if together else [code for each in requests for code in acked(consumer, [each])]
            left = consumer.leasing.leases.of(GROUP, TOPIC)[0].ordinals()
            found.append((codes, left, consumer.offset(), consumer.leasing.leases.counts.acked))
            consumer.parts.close()
    assert found[0] == found[1]


def test_acks_of_a_group_that_wants_them_safe_are_put_on_record_one_by_one(consumer: Consumer) -> None:
    """They are answered as puts are."""
    consumer.parts.context.groups.put(Group(GROUP, attributes={"lease_acks": "safe"}))
    consumer.put("a", "b")
    requests = [fields_of(receipt) for _, receipt in consumer.popped()]
    assert acked(consumer, requests) == [Response.SUCCESS] * 2
    assert len(acks_in_log(consumer)) == 2


def test_acks_without_the_right_are_refused(consumer: Consumer) -> None:
    """Each of them."""
    consumer.put("a", "b")
    requests = [fields_of(receipt) for _, receipt in consumer.popped()]
    consumer.parts.endpoint.anonymous = Principal("stranger")
    consumer.client = Remoting(consumer.parts)
    assert acked(consumer, requests) == [Response.NO_PERMISSION] * 2
    assert consumer.offset() == 0


def test_acks_of_a_broker_with_users_are_authenticated_one_by_one(consumer: Consumer, tmp_path: Path) -> None:
    """Those without a signature are refused on the connection of a user, too."""
    consumer.put("a", "b", "c", "d")
    requests = [fields_of(receipt) for _, receipt in consumer.popped()]
    endpoint = consumer.parts.endpoint
    text = f"users:\n  me: {{secret: {SECRET}, topics: {{{TOPIC}: SUB}}, groups: {{{GROUP}: SUB}}}}\n"
    endpoint.authentication = Authentication(str(write_users(tmp_path / "users.yaml", text)), 5, endpoint.now)
    endpoint.answer_runs(dict(endpoint.known_runs))
    signed = [Credentials("me", SECRET).signed(fields, b"") for fields in requests]
    stolen = {**requests[3], "AccessKey": "me", "Signature": signed[2]["Signature"]}
    assert acked(consumer, [signed[0], requests[1], requests[2], stolen, signed[1]]) == [
        Response.SUCCESS,
        *[Response.NO_PERMISSION] * 3,
        Response.SUCCESS,
    ]
    assert consumer.leasing.leases.of(GROUP, TOPIC)[0].ordinals() == [2, 3]
