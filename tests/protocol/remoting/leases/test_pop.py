"""Pops: headers, the description of an answer and what clients read in it, and receipts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import BadRequest, ReceiptInvalid
from metaq.message import TopicPartition
from metaq.protocol.remoting.headers import Int32, decode_header, encode_header
from metaq.protocol.remoting.leases.described import PoppedQueue, describe_popped
from metaq.protocol.remoting.leases.pop import (
    AckMessage,
    ChangeAnswer,
    ChangeInvisibleTime,
    Notification,
    NotificationAnswer,
    PeekMessage,
    PollingAnswer,
    PollingInfo,
    PopAnswer,
    PopMessage,
    receipts_of,
)
from metaq.protocol.remoting.leases.receipts import Receipt, decode_receipt

RECEIPT = "100 1700000000123 60000 7654321 0 broker-a 3 117"
PLACE = {"consumerGroup": "g", "topic": "t", "queueId": "3"}
ACKED = {**PLACE, "extraInfo": RECEIPT, "offset": "117"}
POP = {**PLACE, "queueId": "-1", "maxMsgNums": "32", "invisibleTime": "60000", "pollTime": "15000", "initMode": "0"}
HEADERS: list[tuple[type[Any], dict[str, str], dict[str, str]]] = [
    (PopMessage, POP, {"bornTime": "17", "expType": "TAG", "exp": "a||b", "order": "true", "attemptId": "x", "bname": "b"}),
    (AckMessage, ACKED, {"bname": "b"}),
    (ChangeInvisibleTime, {**ACKED, "invisibleTime": "10000"}, {"bname": "b"}),
    (PeekMessage, {**PLACE, "maxMsgNums": "32"}, {"bname": "b"}),
    (Notification, {**PLACE, "pollTime": "1", "bornTime": "17"}, {"order": "false", "attemptId": "x", "bname": "b"}),
    (PollingInfo, PLACE, {"bname": "b"}),
]

numbers = st.integers(0, (1 << 63) - 1)
int32s = st.integers(0, (1 << 31) - 1)
brokers = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x3FF, exclude_categories=["Cc", "Zs"]), min_size=1, max_size=20
)
receipts = st.builds(
    Receipt, numbers, numbers, numbers, int32s, st.integers(0, 2), brokers, int32s, numbers, st.none() | numbers
)


# -- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "needed", "other"), HEADERS)
def test_headers_have_rocketmqs_names(kind: type[Any], needed: dict[str, str], other: dict[str, str]) -> None:
    """Each field goes there and back; the fields that the base class of 5.x adds are ignored."""
    whole = needed | other
    assert encode_header(decode_header(kind, whole)) == whole
    assert encode_header(decode_header(kind, whole | {"ns": "n", "nsd": "true", "oway": "false", "lo": "true"})) == whole


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, needed, _ in HEADERS for name in needed])
def test_headers_lack_no_field(kind: type[Any], name: str) -> None:
    """The refusal names the field."""
    needed = next(needed for other, needed, _ in HEADERS if other is kind)
    with pytest.raises(BadRequest, match=f"the field {name} is missing"):
        decode_header(kind, {wire: text for wire, text in needed.items() if wire != name})


def test_a_pop_needs_neither_a_time_nor_a_filter() -> None:
    """What is absent: the broker's own time, everything, no order."""
    header = decode_header(PopMessage, POP)
    assert (header.born_time, header.exp, header.order, header.attempt_id, header.bname) == (0, None, False, None, None)


@pytest.mark.parametrize(
    ("answer", "fields"),
    [
        (
            PopAnswer(17, 60_000, Int32(4_711), 2, "0 1 5", "0 1 5,6"),
            {
                "popTime": "17",
                "invisibleTime": "60000",
                "reviveQid": "4711",
                "restNum": "2",
                "startOffsetInfo": "0 1 5",
                "msgOffsetInfo": "0 1 5,6",
            },
        ),
        (ChangeAnswer(17, 10_000, Int32(4_711)), {"popTime": "17", "invisibleTime": "10000", "reviveQid": "4711"}),
        (NotificationAnswer(True, False), {"hasMsg": "true", "pollingFull": "false"}),
        (PollingAnswer(3), {"pollingNum": "3"}),
    ],
)
def test_answers_have_rocketmqs_names(answer: tuple[Any, ...], fields: dict[str, str]) -> None:
    """There and back."""
    assert encode_header(answer) == fields
    assert decode_header(type(answer), fields) == answer


# -- the description of an answer -------------------------------------------------------------------------------------


def test_description_is_as_java_clients_split_it() -> None:
    """One entry a queue, separated by semicolons, in the order of the body."""
    popped = [PoppedQueue(3, (117, 118, 120)), PoppedQueue(0, (7,))]
    assert describe_popped(popped) == ("0 3 117;0 0 7", "0 3 117,118,120;0 0 7", None)
    assert describe_popped([]) == ("", "", None)


def test_times_are_told_when_order_was_asked_for() -> None:
    """The fewest of a queue for clients that know no more, and those that differ, by offset."""
    popped = [PoppedQueue(3, (117, 118), (2, 0)), PoppedQueue(0, (7,), (1,)), PoppedQueue(1, (4, 5), (0, 0))]
    assert describe_popped(popped).order_count_info == "0 3 0;0 qo3%117 2;0 0 1;0 1 0"


def test_a_queue_that_comes_twice_is_an_error_of_the_program() -> None:
    """A Java client would throw the whole answer away."""
    with pytest.raises(ValueError, match="comes twice"):
        describe_popped([PoppedQueue(3, (1,)), PoppedQueue(3, (2,))])


def counts_of(info: str | None) -> dict[str, int]:
    """``orderCountInfo`` as a client reads it."""
    entries = [entry.split(" ") for entry in (info or "").split(";") if entry]
    assert len({key for _, key, _ in entries}) == len(entries)
    return {key: int(times) for _, key, times in entries}


offset_lists = st.lists(st.integers(0, 1 << 40), min_size=1, max_size=32, unique=True)
answers = st.dictionaries(st.integers(0, 1023), offset_lists, max_size=8)


@given(answers, st.randoms(use_true_random=False))
def test_clients_find_every_message_in_the_description(answer: dict[int, list[int]], random: Any) -> None:
    """Property: what is built here, a client reads as the place and the times of each record of the body."""
    popped = [PoppedQueue(queue, offsets, [random.randrange(4) for _ in offsets]) for queue, offsets in answer.items()]
    described = describe_popped(popped)
    header = PopAnswer(17, 60_000, Int32(4_711), 0, *described)
    fields = encode_header(header)
    body = [(TopicPartition("t", part.queue), offset) for part in popped for offset in part.offsets]
    found = receipts_of(decode_header(PopAnswer, fields), "broker-a", body)
    assert found == [
        Receipt(min(answer[queue.partition]), 17, 60_000, 4_711, 0, "broker-a", queue.partition, offset)
        for queue, offset in body
    ]
    times = counts_of(described.order_count_info)
    for part in popped:
        for offset, count in zip(part.offsets, part.times or (), strict=True):
            assert times.get(f"qo{part.queue}%{offset}", times[str(part.queue)]) == count


def test_the_mark_comes_from_the_topic_of_the_record() -> None:
    """RocketMQ's brokers answer with messages of retry topics among others."""
    header = PopAnswer(17, 60_000, Int32(0), 0, "0 0 5;1 0 6;2 0 7", "0 0 5;1 0 6;2 0 7")
    body = [(TopicPartition(topic, 0), 5 + mark) for mark, topic in enumerate(("t", "%RETRY%g_t", "%RETRY%g+t"))]
    assert [(receipt.mark, receipt.offset) for receipt in receipts_of(header, "b", body)] == [(0, 5), (1, 6), (2, 7)]


def test_without_a_start_it_is_the_first_message() -> None:
    """As the Java client does."""
    header = PopAnswer(17, 60_000, Int32(0), 0, None, "0 3 7,8")
    body = [(TopicPartition("t", 3), 7), (TopicPartition("t", 3), 8)]
    assert [receipt.start_offset for receipt in receipts_of(header, "b", body)] == [7, 7]


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ("0 3 7,8;0 3 9", "twice"),
        ("0 3 7", "does not have the messages of queue 3"),
        ("0 4 7,8", "does not have the messages of queue 3"),
        ("0 3", "not a mark, a queue and offsets"),
        ("0 3 7, 8", "not a mark, a queue and offsets"),
        ("0 x 7,8", "not a number"),
        ("0 3 7,", "not a number"),
        (None, "does not have the messages of queue 3"),
    ],
)
def test_an_answer_that_does_not_describe_its_records_is_refused(info: str | None, why: str) -> None:
    """No receipt is made of a guess."""
    header = PopAnswer(17, 60_000, Int32(0), 0, "0 3 7", info)
    with pytest.raises(BadRequest, match=why):
        receipts_of(header, "b", [(TopicPartition("t", 3), 7), (TopicPartition("t", 3), 8)])


# -- receipts ---------------------------------------------------------------------------------------------------------


def test_receipt_is_the_eight_words_of_the_java_client() -> None:
    """The proxy appends a ninth."""
    receipt = Receipt(100, 1_700_000_000_123, 60_000, 7_654_321, 0, "broker-a", 3, 117)
    assert str(receipt) == RECEIPT
    assert decode_receipt(RECEIPT) == receipt
    assert decode_receipt(RECEIPT + " 4096") == receipt._replace(log_offset=4096)


@given(receipts)
def test_receipts_round_trip(receipt: Receipt) -> None:
    """Every word."""
    assert decode_receipt(str(receipt)) == receipt


@given(receipts, st.data())
def test_mutated_receipts_are_read_as_written_or_refused(receipt: Receipt, data: st.DataObject) -> None:
    """No other error, and no second way to write one."""
    text = str(receipt)
    at = data.draw(st.integers(0, len(text)))
    changed = text[:at] + data.draw(st.text(max_size=2)) + text[at + data.draw(st.integers(0, 3)) :]
    try:
        found = decode_receipt(changed)
    except ReceiptInvalid as error:
        assert error.code == 13
    else:
        assert str(found) == changed


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "x" * 100_000,
        RECEIPT.rsplit(" ", 1)[0],
        RECEIPT + " 1 2",
        RECEIPT + " ",
        " " + RECEIPT,
        RECEIPT.replace(" ", "  ", 1),
        RECEIPT.replace(" 0 ", " 3 "),
        RECEIPT.replace("100", "-1"),
        RECEIPT.replace("100", "0100"),
        RECEIPT.replace("100", "٣"),
        RECEIPT.replace("100", str(1 << 63)),
        RECEIPT.replace("7654321", str(1 << 31)),
        RECEIPT.replace(" 3 ", f" {1 << 31} "),
        RECEIPT.replace("broker-a", "b" * 256),
        RECEIPT + "\n",
    ],
)
def test_other_texts_are_no_receipts(wrong: str) -> None:
    """The error shows no more than its beginning."""
    with pytest.raises(ReceiptInvalid) as refused:
        decode_receipt(wrong)
    assert len(str(refused.value)) < 400
