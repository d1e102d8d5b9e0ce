"""``subscribe``, ``pop``, ``ack`` and the others about leases, puts with options, and IDs: bytes, meaning, refusals."""

from dataclasses import dataclass
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import BadRequest
from metaq.protocol.text.codec import CommandReader, TextLimits
from metaq.protocol.text.commands import (
    NO_CHECKSUM,
    NO_OPAQUE,
    Ack,
    Command,
    Create,
    Due,
    Extend,
    Invalid,
    Nack,
    Pop,
    Put,
    PutOptions,
    PutWith,
    Ready,
    Subscribe,
    Transaction,
    Unsubscribe,
)
from metaq.protocol.text.ids import DIGITS, MOST_IDS, MessageId, encode_token, read_id, read_ids
from metaq.protocol.text.leaselines import COUNT, DELAY, INVISIBLE, PARTITION, READY
from metaq.protocol.text.tokens import INT32, INT64, OPAQUE
from metaq.protocol.text.writing import (
    write_ack,
    write_extend,
    write_nack,
    write_pop,
    write_put,
    write_ready,
    write_subscribe,
)
from tests.support.wire import feed, random_slices, slicings

LIMITS: Final = TextLimits(max_line_bytes=64 * 1024)
ID: Final = MessageId(0, 17, "4q9zk2")
OTHER: Final = MessageId(1023, (1 << 63) - 1, "0")
WRITTEN: Final = "0-17-4q9zk2"


def read(data: bytes) -> list[Command]:
    return CommandReader(LIMITS).receive(data)


def plain_subscribe(**fields: object) -> Subscribe:
    nothing = Subscribe("orders", "billing", 1, None, None, None, None, False, None, False, NO_OPAQUE)
    return nothing._replace(**fields)  # type: ignore[arg-type]


def pop(**fields: object) -> Pop:
    return Pop("orders", "billing", 1, None, 0, None, None, NO_OPAQUE)._replace(**fields)  # type: ignore[arg-type]


def put_with(*, options: PutOptions, checksum: int = NO_CHECKSUM, transaction: str | None = None, opaque: str = "9") -> PutWith:
    return PutWith(Put("orders", 0, 0, checksum, transaction, opaque, b"a\r\nb"), options)


PUT: Final = "put orders 0 4 0"
BODY: Final = b"a\r\nb"


@dataclass(frozen=True)
class Case:
    line: str
    command: Command
    body: bytes = b""

    @property
    def data(self) -> bytes:
        return self.line.encode() + b"\r\n" + self.body


GOLDEN: Final = [
    Case("subscribe orders billing", plain_subscribe()),
    Case("subscribe orders billing 7", plain_subscribe(opaque="7")),
    Case("subscribe orders 5", plain_subscribe(group="5")),
    Case("subscribe orders billing ready=2 1", plain_subscribe(ready=2, opaque="1")),
    Case(
        "subscribe orders billing crc=yes name=a1 assign=own attribute=grün partition=3 from=last invisible=30000 ready=0 -1",
        plain_subscribe(
            ready=0,
            invisible_ms=30_000,
            from_first=False,
            partition=3,
            attribute="grün",
            owns=True,
            name="a1",
            with_crc=True,
            opaque="-1",
        ),
    ),
    Case("subscribe orders billing assign=shared from=first crc=no", plain_subscribe(from_first=True)),
    Case("unsubscribe orders billing", Unsubscribe("orders", "billing", NO_OPAQUE)),
    Case("unsubscribe orders billing 4294967295", Unsubscribe("orders", "billing", "4294967295")),
    Case("ready 5", Ready(5, None, None, NO_OPAQUE)),
    Case("ready 0 7", Ready(0, None, None, "7")),
    Case("ready 10000 orders billing", Ready(10_000, "orders", "billing", NO_OPAQUE)),
    Case("ready 5 orders billing 7", Ready(5, "orders", "billing", "7")),
    Case("pop orders billing", pop()),
    Case("pop orders billing 5", pop(most=5)),
    Case("pop orders billing 5 7", pop(most=5, opaque="7")),
    Case("pop orders billing wait=20 7", pop(wait_ms=20, opaque="7")),
    Case(
        "pop orders billing 32 attribute=red from=first wait=2147483647 invisible=1000 7",
        pop(most=32, invisible_ms=1000, wait_ms=INT32[1], from_first=True, attribute="red", opaque="7"),
    ),
    Case(f"ack {WRITTEN}", Ack((ID,), None, None, NO_OPAQUE)),
    Case(f"ack {WRITTEN},{OTHER} 7", Ack((ID, OTHER), None, None, "7")),
    Case(f"ack orders billing {WRITTEN}", Ack((ID,), "orders", "billing", NO_OPAQUE)),
    Case(f"ack orders billing {WRITTEN} 7", Ack((ID,), "orders", "billing", "7")),
    Case(f"nack {WRITTEN}", Nack((ID,), None, False, None, None, NO_OPAQUE)),
    Case(f"nack {WRITTEN} 7", Nack((ID,), None, False, None, None, "7")),
    Case(f"nack {WRITTEN} delay=0", Nack((ID,), 0, False, None, None, NO_OPAQUE)),
    Case(f"nack {WRITTEN} dead 7", Nack((ID,), None, True, None, None, "7")),
    Case(f"nack dead dead {WRITTEN} dead", Nack((ID,), None, True, "dead", "dead", NO_OPAQUE)),
    Case(f"nack orders billing {WRITTEN} delay=5000 7", Nack((ID,), 5000, False, "orders", "billing", "7")),
    Case(f"extend {WRITTEN} 1000", Extend((ID,), 1000, None, None, NO_OPAQUE)),
    Case(f"extend {WRITTEN} 1000 7", Extend((ID,), 1000, None, None, "7")),
    Case(f"extend orders billing {WRITTEN} 43200000", Extend((ID,), 43_200_000, "orders", "billing", NO_OPAQUE)),
    Case(f"extend orders billing {WRITTEN} 1000 7", Extend((ID,), 1000, "orders", "billing", "7")),
    Case("create orders 4 priority=yes 7", Create("orders", 4, True, "7")),
    Case("create orders 4 priority=yes", Create("orders", 4, True, NO_OPAQUE)),
    Case("create orders 4 priority=no 7", Create("orders", 4, False, "7")),
    Case(f"{PUT} delay=5 9", put_with(options=PutOptions(Due(5, True))), BODY),
    Case(f"{PUT} at=1700000000000 9", put_with(options=PutOptions(Due(1_700_000_000_000, False))), BODY),
    Case(f"{PUT} 123 priority=7 9", put_with(options=PutOptions(priority=7), checksum=123), BODY),
    Case(f"{PUT} id=a-1 9", put_with(options=PutOptions(id="a-1")), BODY),
    Case(f"{PUT} key=é= 9", put_with(options=PutOptions(key="é=")), BODY),
    Case(
        f"{PUT} -1 key=k id=i priority=0 delay=1 9",
        put_with(options=PutOptions(Due(1, True), priority=0, id="i", key="k")),
        BODY,
    ),
    Case(
        f"{PUT} 123 TX:a:1 priority=1 key=k 9",
        put_with(options=PutOptions(priority=1, key="k"), checksum=123, transaction="TX:a:1"),
        BODY,
    ),
    Case(f"{PUT} 123 XID:1:aa:bb:a=b 9", Put("orders", 0, 0, 123, "XID:1:aa:bb:a=b", "9", BODY), BODY),
    Case("transaction TX:a:1 a BEGIN a=b 9", Transaction("TX:a:1", "a", "BEGIN", 0, "a=b", "9")),
]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.line)
def test_a_line_and_what_it_means(case: Case) -> None:
    """MY-008, MY-031, ES-102, ES-103, E-07, E-08: the same in any slices, twice in a row, and in step with what follows."""
    for name, pieces in slicings(2 * case.data + b"quit\r\n", 1):
        reader = CommandReader(LIMITS)
        assert feed(reader.receive, pieces)[:-1] == [case.command] * 2, name
        assert reader.buffered == 0


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.line)
def test_a_line_after_ordinary_puts(case: Case) -> None:
    """What readers remember of puts changes the meaning of none."""
    before = b"".join(f"{PUT}{word} 1\r\n".encode() + BODY for word in ("", " 123", " 123 TX:a:1"))
    assert read(before + case.data)[3:] == [case.command]


SUBSCRIBE_KNOWS: Final = "it knows ready=, invisible=, from=, partition=, attribute=, assign=, name=, crc="
PUT_KNOWS: Final = "it knows delay=, at=, priority=, id=, key="
REFUSALS: Final = [
    ("subscribe 7", "subscribe needs TOPIC GROUP [OPTION=VALUE …] [OPAQUE]"),
    ("subscribe orders billing 5 ready=1 7", "subscribe needs TOPIC GROUP [OPTION=VALUE …] [OPAQUE]"),
    ("subscribe orders billing ready=1 5 7", "subscribe needs TOPIC GROUP [OPTION=VALUE …] [OPAQUE]"),
    ("subscribe orders billing speed=1 7", f"subscribe does not know the option speed=; {SUBSCRIBE_KNOWS}"),
    ("subscribe orders billing ready=1 ready=1 7", "subscribe has the option ready= twice"),
    ("subscribe orders billing ready=10001 7", "ready 10001 is not within 0 … 10000"),
    ("subscribe orders billing ready= 7", "ready '' is not a decimal number"),
    ("subscribe orders billing invisible=999 7", "invisible 999 is not within 1000 … 43200000"),
    ("subscribe orders billing partition=1024 7", "partition 1024 is not within 0 … 1023"),
    ("subscribe orders billing from=middle 7", "from is first or last, not 'middle'"),
    ("subscribe orders billing assign=mine 7", "assign is own or shared, not 'mine'"),
    ("subscribe orders billing crc=1 7", "crc is yes or no, not '1'"),
    ("subscribe orders billing name= 7", "name '' is not a word of 1 to 255 bytes without control characters"),
    ("subscribe orders bill\x01ing 7", "group 'bill\\x01ing' is not a word of 1 to 255 bytes without control characters"),
    (f"subscribe {'t' * 256} billing 7", f"topic {'t' * 40!r} is not a word of 1 to 255 bytes without control characters"),
    ("unsubscribe 7", "unsubscribe needs TOPIC GROUP [OPAQUE]"),
    ("unsubscribe orders billing ready=1 7", "unsubscribe does not know the option ready=; it knows none"),
    ("ready 10001 7", "ready 10001 is not within 0 … 10000"),
    ("ready 5 orders billing more 7", "ready needs N [TOPIC GROUP] [OPAQUE]"),
    ("pop 7", "pop needs TOPIC GROUP [COUNT] [OPTION=VALUE …] [OPAQUE]"),
    ("pop orders billing 0 7", "count 0 is not within 1 … 1024"),
    ("pop orders billing 1025 7", "count 1025 is not within 1 … 1024"),
    ("pop orders billing wait=2147483648 7", "wait 2147483648 is not within 0 … 2147483647"),
    (
        "pop orders billing ready=1 7",
        "pop does not know the option ready=; it knows invisible=, wait=, from=, attribute=",
    ),
    ("ack", "ack needs [TOPIC GROUP] ID[,ID…] [OPAQUE]"),
    ("ack orders billing 7", "'7' is not an ID of the form PARTITION-ORDINAL-TOKEN"),
    (f"ack {WRITTEN}, 7", "'' is not an ID of the form PARTITION-ORDINAL-TOKEN"),
    (f"ack {WRITTEN} delay=1 7", "ack does not know the option delay=; it knows none"),
    ("ack 1024-1-a 7", "the partition of the ID 1024-1-a is not within 0 … 1023"),
    (f"ack 1-{1 << 63}-a 7", f"the ordinal of the ID 1-{1 << 63}-a is not within 0 … {(1 << 63) - 1}"),
    (f"ack {','.join([WRITTEN] * 1025)} 7", "1025 IDs in one command are more than 1024"),
    (f"nack {WRITTEN} delay=1 dead 7", "nack takes one of delay=MS and dead, not both"),
    (f"nack {WRITTEN} dead dead 7", "nack has the option dead twice"),
    (f"nack {WRITTEN} wait=1 7", "nack does not know the option wait=; it knows delay=, dead"),
    (f"nack {WRITTEN} delay=43200001 7", "delay 43200001 is not within 0 … 43200000"),
    ("nack", "nack needs [TOPIC GROUP] ID[,ID…] [delay=MS | dead] [OPAQUE]"),
    (f"extend {WRITTEN}", "extend needs [TOPIC GROUP] ID[,ID…] MS [OPAQUE]"),
    (f"extend {WRITTEN} 999 7", "time 999 is not within 1000 … 43200000"),
    (f"extend {WRITTEN} 1000 ready=1 7", "extend does not know the option ready=; it knows none"),
    ("create orders 4 priority=maybe 7", "priority is yes or no, not 'maybe'"),
    ("create orders 4 speed=1 7", "create does not know the option speed=; it knows priority="),
]


@pytest.mark.parametrize(("line", "text"), REFUSALS, ids=lambda value: str(value)[:60])
def test_a_refused_line(line: str, text: str) -> None:
    """MY-008: refused with a sentence that says what is wrong, under the line's opaque; the next command is read."""
    refused, following = read(f"{line}\r\nversion 1\r\n".encode())
    assert isinstance(refused, Invalid)
    assert isinstance(refused.error, BadRequest)
    assert str(refused.error) == text
    assert refused.opaque == (line.rpartition(" ")[2] if line.endswith(" 7") else NO_OPAQUE)
    assert not isinstance(following, Invalid)


REFUSED_PUTS: Final = [
    ("speed=1", f"put does not know the option speed=; {PUT_KNOWS}"),
    ("id=a id=b", "put has the option id= twice"),
    ("delay=1 at=1", "put takes one of delay=MS and at=MS, not both"),
    ("TX:a:1 delay=1", "a put in a transaction cannot have the option delay="),
    ("TX:a:1 at=1", "a put in a transaction cannot have the option at="),
    ("5 TX:a:1 key=k id=i", "a put in a transaction cannot have the option id="),
    ("delay=-1", f"delay -1 is not within 0 … {INT64[1]}"),
    ("priority=-1", "priority -1 is not within 0 … 2147483647"),
    ("priority=2147483648", "priority 2147483648 is not within 0 … 2147483647"),
    ("priority=high", "priority 'high' is not a decimal number"),
    ("id=", "id '' is not a word of 1 to 255 bytes without control characters"),
    ("key=a\x02b", "key 'a\\x02b' is not a word of 1 to 255 bytes without control characters"),
    (f"key={'k' * 256}", f"key {'k' * 40!r} is not a word of 1 to 255 bytes without control characters"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED_PUTS)
def test_a_refused_put(options: str, text: str) -> None:
    """MY-029, E-07: its body is not taken for a command."""
    refused, following = read(f"{PUT} {options} 9\r\n".encode() + BODY + b"version 1\r\n")
    assert isinstance(refused, Invalid)
    assert str(refused.error) == text
    assert refused.opaque == "9"
    assert not isinstance(following, Invalid)


def test_a_key_that_is_not_utf_8() -> None:
    (refused,) = read(b"put orders 0 1 0 key=\xff 9\r\nx")
    assert isinstance(refused, Invalid)
    assert str(refused.error) == "key 'ÿ' is not UTF-8"


# -- IDs --------------------------------------------------------------------------------------------------------------

ids = st.builds(MessageId, st.integers(*PARTITION), st.integers(0, INT64[1]), st.text(DIGITS, min_size=1, max_size=8))


@given(ids)
def test_an_id_written_is_read_back(one: MessageId) -> None:
    assert read_id(str(one)) == one


@given(st.text("0123456789-abiloqz+ ,", max_size=20))
def test_an_id_has_one_form(text: str) -> None:
    """What is read as an ID is written the same."""
    try:
        one = read_id(text)
    except BadRequest:
        return
    assert str(one) == text


@pytest.mark.parametrize(
    "text", ["", "1-2", "1-2-", "01-2-a", "1-02-a", "-1-2-a", "1-+2-a", "1-2-i", "1-2-A", "1-2-123456789", "1-2-a\n", "١-2-a"]
)
def test_what_is_no_id(text: str) -> None:
    with pytest.raises(BadRequest, match="is not an ID of the form PARTITION-ORDINAL-TOKEN"):
        read_id(text)


def test_as_many_ids_as_one_command_takes() -> None:
    assert read_ids(",".join([WRITTEN] * MOST_IDS)) == (ID,) * MOST_IDS


def test_tokens_that_the_broker_makes() -> None:
    """The lowest 30 bits, the highest first; each other bits, another token."""
    assert encode_token(0) == "000000"
    assert encode_token(1) == "000001"
    assert encode_token((1 << 31) - 1) == "zzzzzz"
    assert len({encode_token(1 << place) for place in range(30)}) == 30


# -- written and read -------------------------------------------------------------------------------------------------

opaques = st.integers(*OPAQUE)
numbers = opaques.map(str)
words = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters=" \xa0"), min_size=1, max_size=60)
invisible = st.none() | st.integers(*INVISIBLE)
places = st.none() | st.booleans()
some_ids = st.lists(ids, min_size=1, max_size=20).map(tuple)
groups = st.tuples(words.filter(lambda text: "=" not in text), words.filter(lambda text: "=" not in text)) | st.just(
    (None, None)
)

subscribes = st.builds(
    Subscribe,
    words,
    words,
    st.integers(*READY),
    invisible,
    places,
    st.none() | st.integers(*PARTITION),
    st.none() | words,
    st.booleans(),
    st.none() | words,
    st.booleans(),
    numbers,
)
pops = st.builds(
    Pop, words, words, st.integers(*COUNT), invisible, st.integers(0, INT32[1]), places, st.none() | words, numbers
)
readies = st.tuples(st.integers(*READY), groups, numbers).map(lambda t: Ready(t[0], t[1][0], t[1][1], t[2]))
acks = st.tuples(some_ids, groups, numbers).map(lambda t: Ack(t[0], t[1][0], t[1][1], t[2]))
fates = st.tuples(st.none() | st.integers(*DELAY), st.just(False)) | st.just((None, True))
nacks = st.tuples(some_ids, fates, groups, numbers).map(lambda t: Nack(t[0], t[1][0], t[1][1], t[2][0], t[2][1], t[3]))
extends = st.tuples(some_ids, st.integers(*INVISIBLE), groups, numbers).map(
    lambda t: Extend(t[0], t[1], t[2][0], t[2][1], t[3])
)
dues = st.none() | st.builds(Due, st.integers(0, INT64[1]), st.booleans())
options = st.builds(PutOptions, dues, st.none() | st.integers(0, INT32[1]), st.none() | words, st.none() | words)

Frame = tuple[bytes, Command]

frames: st.SearchStrategy[Frame] = st.one_of(
    subscribes.map(lambda command: (write_subscribe(command), command)),
    pops.map(lambda command: (write_pop(command), command)),
    readies.map(lambda command: (write_ready(command), command)),
    acks.map(lambda command: (write_ack(command), command)),
    nacks.map(lambda command: (write_nack(command), command)),
    extends.map(lambda command: (write_extend(command), command)),
    st.tuples(words, words, opaques).map(
        lambda t: (f"unsubscribe {t[0]} {t[1]} {t[2]}\r\n".encode(), Unsubscribe(t[0], t[1], str(t[2])))
    ),
    opaques.map(lambda opaque: (b"create orders 4 %d\r\n" % opaque, Create("orders", 4, False, str(opaque)))),
    opaques.map(lambda opaque: (b"create orders 4 priority=yes %d\r\n" % opaque, Create("orders", 4, True, str(opaque)))),
    st.tuples(options.filter(lambda drawn: drawn != PutOptions()), opaques).map(
        lambda t: (
            write_put("orders", 0, 0, BODY, t[1], options=t[0], old=True),
            PutWith(Put("orders", 0, 0, NO_CHECKSUM, None, str(t[1]), BODY), t[0]),
        )
    ),
)


@given(st.lists(frames, max_size=8), st.integers(0, 1 << 32))
def test_what_clients_write_is_read_back(drawn: list[Frame], seed: int) -> None:
    """MY-008, MY-029, MY-031: any run of commands, in any slices."""
    data = b"".join(frame for frame, _ in drawn)
    expected = [command for _, command in drawn]
    assert feed(CommandReader(LIMITS).receive, random_slices(data, seed)) == expected
    assert feed(CommandReader(LIMITS).receive, [data] if data else []) == expected


@given(
    st.sampled_from(["subscribe", "unsubscribe", "ready", "pop", "ack", "nack", "extend", "create"]),
    st.lists(
        st.sampled_from(["7", "orders", "dead", WRITTEN, "delay=1", "from=", "=", "ready=x", "", "a=b"]) | words, max_size=9
    ),
)
def test_any_tokens_are_a_command_or_refused(command: str, tokens: list[str]) -> None:
    """Each line is answered once, and the next one is read."""
    first, following = read(" ".join([command, *tokens]).encode() + b"\r\nversion 1\r\n")
    assert str(first)
    assert not isinstance(following, Invalid)
