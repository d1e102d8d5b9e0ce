"""Groups of records (``metaq.store.recordgroups``): how they are staged, and that recovery keeps all of one or nothing."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from metaq.checksum import body_crc
from metaq.cli.host.verify import verify as verify_command
from metaq.errors import BadRequest, DiskFull
from metaq.message import Durability, TopicPartition
from metaq.protocol.keys import KEYS, keys_of
from metaq.protocol.record import (
    BLANK_SIZE,
    GROUP_MEMBER,
    checksum_property,
    constant_middle,
    decode_properties,
    decode_record,
    encode_properties,
    host_bytes,
    record_tail,
)
from metaq.protocol.text.messages import HEADER_SIZE_TEXT
from metaq.store.files.documents import read_document
from metaq.store.files.filecache import read_here, run_here
from metaq.store.log.retention import RetentionRules
from metaq.store.log.walk import Gap
from metaq.store.messagestore import LOG, MessageStore
from metaq.store.newrecord import NewRecord
from metaq.store.recordgroups import END_SIZE, group_end, put_record_group
from metaq.store.recovery.recovery import QUARANTINE, Recovery, open_store
from metaq.store.recovery.verify import repair, verify
from metaq.store.settings import StoreSettings
from tests.crash.driver import quiet
from tests.support.faultydisk import DATA, FaultyDisk

HOST: Final = host_bytes("10.0.0.1", 8123)
MARKS: Final = TopicPartition("METAQ_SYS_TRANSACTIONS", 0)
FIRST, SECOND = TopicPartition("t", 0), TopicPartition("t", 1)
SEGMENT: Final = 2048
SETTINGS: Final = StoreSettings(
    segment_bytes=SEGMENT,
    queue_file_bytes=256,
    index_slots=5,
    index_entries=40,
    durability=Durability.MEMORY,
    retention=RetentionRules(keep_ms=1000, ample_free_bytes=1 << 30, least_free_bytes=1),
)


@pytest.fixture(autouse=True)
def _no_reports() -> Iterator[None]:
    with quiet():
        yield


def ready(store: MessageStore, key: TopicPartition, body: bytes, sys_flag: int = 0) -> NewRecord:
    """A message, with its body as its key where its topic has keys."""
    tail: bytes | None = None
    keys: tuple[str, ...] = ()
    if key != MARKS:
        properties = encode_properties([(KEYS, body[:8].hex())])
        tail, keys = record_tail(key.topic, properties), keys_of(key.topic, 0, properties)
    middle = constant_middle(sys_flag, 1_700_000_000_000, HOST, 1_700_000_000_001, HOST)
    return NewRecord(
        queue=store.queue(*key),
        flag=0,
        body=body,
        crc=body_crc(body),
        middle=middle,
        text_size=HEADER_SIZE_TEXT + len(body),
        tail=tail,
        keys=keys,
    )


def test_a_put_takes_the_fields_of_a_record_by_name(tmp_path: Path) -> None:
    """Its parameters are spelled out, so this compares them."""
    store, _ = open_store(tmp_path, SETTINGS)
    new = ready(store, FIRST, b"one")
    offsets = [store.put(**new._asdict()), store.put(*new)]
    store.append()
    stored = [store.log.record_at(offset) for offset in offsets]
    assert [each.size for each in stored if each is not None] == [new.size, new.size]
    assert bodies(store, FIRST) == [b"one", b"one"]


def put(store: MessageStore, key: TopicPartition, body: bytes) -> int:
    """Append one message."""
    offset = store.put(*ready(store, key, body))
    store.append()
    return offset


def bodies(store: MessageStore, key: TopicPartition) -> list[bytes | None]:
    """Return the bodies that readers of a partition get, ``None`` where a message is lost."""
    queue = store.queue(*key)
    found = store.records(queue, queue.base, 1000, read_here)
    return [None if each is None else bytes(decode_record(each.buffer[each.at : each.at + each.size]).body) for each in found]


class Written(NamedTuple):
    """A folder whose process was killed. In its log: *before*, a mark, three members, and perhaps *behind*."""

    disk: FaultyDisk
    offsets: list[int]
    """Of the mark and its members."""
    ends: list[int]
    """Where each of them ends."""
    behind: list[int]
    log_end: int

    @property
    def end(self) -> int:
        """Where the group ends."""
        return self.ends[-1]

    def opened(self, disk: FaultyDisk) -> tuple[MessageStore, Recovery]:
        return open_store(DATA, SETTINGS, disk=disk)

    def copy(self) -> FaultyDisk:
        return self.disk.copy(random.Random(0))


GROUP: Final = ((FIRST, b"member one"), (SECOND, b"member two" * 9), (FIRST, b"member three"))


def written(*, roll: bool, behind: bool, trusted: bool = False) -> Written:
    """Make one; with ``roll`` the group goes on in a second segment, with ``trusted`` a sweep came last."""
    disk = FaultyDisk(random.Random(0))
    store, _ = open_store(DATA, SETTINGS, disk=disk)
    before = [FIRST, SECOND, MARKS]
    for key in before:
        put(store, key, b"before")
    store.checkpoint()
    if roll:
        put(store, SECOND, b"padding".ljust(SEGMENT - store.log.end - 600, b"."))
    mark, rest = ready(store, MARKS, b'{"do":"commit"}'), [ready(store, *each) for each in GROUP]
    sizes = [mark.size + END_SIZE, *(each.size for each in rest)]
    offsets = put_record_group(store, mark, rest)
    store.append()
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert (offsets[1] // SEGMENT != offsets[2] // SEGMENT) == roll
    later = [put(store, key, b"behind") for key in (SECOND, MARKS)] if behind else []
    if trusted:
        store.sweep()
    disk.killed()
    return Written(disk, offsets, ends, later, store.log.end)


def damage(disk: FaultyDisk, at: int, *, until: int | None = None) -> None:
    """Flip a byte of the log, or zero a range of it."""
    if until is None:
        disk.content(DATA / LOG / f"{at // SEGMENT * SEGMENT:020d}")[at % SEGMENT] ^= 0xFF
        return
    while at < until:
        base = at // SEGMENT * SEGMENT
        size = min(until, base + SEGMENT) - at
        disk.content(DATA / LOG / f"{base:020d}")[at - base : at - base + size] = bytes(size)
        at += size


def expect_without_group(store: MessageStore, folder: Written) -> None:
    """No way of reading leads to any record of the group."""
    for key in (FIRST, SECOND, MARKS):
        assert not {body for _, body in GROUP} & set(bodies(store, key))
        assert bodies(store, key)[0] == b"before"
    assert b'{"do":"commit"}' not in bodies(store, MARKS)
    for log_offset in folder.offsets:
        assert store.record_at_offset(log_offset, read_here) is None
    store.index_keys()
    for key, body in GROUP:
        assert store.query(key.topic, body[:8].hex(), 0, 1 << 62, 64, read_here) == []


# -- staging ----------------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_mark() -> None:
    """MQ-107, RD-105: golden bytes of a mark whose members follow it, and the bit of the first member."""
    store, _ = open_store(DATA, SETTINGS, disk=FaultyDisk(random.Random(0)))
    offsets = put_record_group(store, ready(store, MARKS, b"{}"), [ready(store, FIRST, b"m")])
    store.append()
    assert offsets == [0, 168]
    mark, member = [store.log.record_at(each) for each in offsets]
    assert mark is not None
    assert member is not None
    data = bytes.fromhex(
        "000000a8 daa320a7 23a6bf43 00000000 00000000"  # size, magic, CRC of the body, partition, flag
        "0000000000000000 0000000000000000 00000000"  # queue offset, log offset, system flag
        "0000018bcfe56800 0a00000100001fbb 0000018bcfe56801 0a00000100001fbb"  # born, stored
        "00000000 0000000000000000 00000002 7b7d"  # reconsume times, text position, body
        "16 4d455441515f5359535f5452414e53414354494f4e53"  # METAQ_SYS_TRANSACTIONS
        "0035 4d455441515f47524f55505f454e44 01 30303030303030303030303030313231 02"  # METAQ_GROUP_END
    )
    assert bytes(mark.buffer[mark.at : mark.at + mark.size]) == data + checksum_property(data)
    assert group_end(mark) == store.log.end == 0x121
    assert group_end(member) is None
    assert decode_record(member.buffer[member.at : member.at + member.size]).sys_flag == 0x40000000
    assert decode_record(mark.buffer[mark.at : mark.at + mark.size]).sys_flag == 0


def test_a_mark_alone_is_an_ordinary_record() -> None:
    """MQ-107: nothing is added to it."""
    store, _ = open_store(DATA, SETTINGS, disk=FaultyDisk(random.Random(0)))
    mark = ready(store, MARKS, b"{}")
    (offset,) = put_record_group(store, mark, [])
    store.append()
    stored = store.log.record_at(offset)
    assert stored is not None
    assert (stored.size, group_end(stored)) == (mark.size, None)
    assert decode_record(stored.buffer).properties == b""


def test_the_marks_own_properties_stay() -> None:
    """RD-105: the end stands behind them."""
    store, _ = open_store(DATA, SETTINGS, disk=FaultyDisk(random.Random(0)))
    op = TopicPartition("RMQ_SYS_TRANS_OP_HALF_TOPIC", 0)
    mark = ready(store, op, b"17")._replace(tail=record_tail(op.topic, encode_properties([("TAGS", "d")])))
    offset, _ = put_record_group(store, mark, [ready(store, FIRST, b"m")])
    store.append()
    stored = store.log.record_at(offset)
    assert stored is not None
    assert decode_properties(decode_record(stored.buffer).properties) == {
        "TAGS": "d",
        "METAQ_GROUP_END": f"{store.log.end:016X}",
    }
    assert group_end(stored) == store.log.end


@given(
    before=st.lists(st.integers(0, 1800), max_size=3),
    members=st.lists(st.integers(0, 700), min_size=1, max_size=5),
    spare=st.booleans(),
)
def test_the_end_is_known_before_anything_is_staged(before: list[int], members: list[int], spare: bool) -> None:
    """MQ-107: wherever a segment ends; what does not fit into one is refused, and nothing of it is staged."""
    store, _ = open_store(DATA, SETTINGS, disk=FaultyDisk(random.Random(0)))
    for size in before:
        store.put(*ready(store, SECOND, bytes(size)))
    if spare:
        store.append()
        store.log.prepare(run_here, run_here)
    mark, rest = ready(store, MARKS, b"{}"), [ready(store, FIRST, bytes(size)) for size in members]
    total = END_SIZE + sum(each.size for each in (mark, *rest))
    staged = store.log.staged_end
    if total > SEGMENT - 8:
        with pytest.raises(BadRequest, match=f"{1 + len(members)} records kept together take {total} bytes.* room for 2040"):
            put_record_group(store, mark, rest)
        assert (store.log.staged_end, store.queue(*MARKS).next, store.queue(*FIRST).next) == (staged, 0, 0)
        return
    offsets = put_record_group(store, mark, rest)
    store.append()
    stored = store.log.record_at(offsets[0])
    last = store.log.record_at(offsets[-1])
    assert stored is not None
    assert last is not None
    assert group_end(stored) == store.log.end == last.log_offset + last.size
    assert bodies(store, FIRST) == [bytes(size) for size in members]


def test_a_full_disk_refuses_the_group_whole() -> None:
    """MQ-107: nothing is staged when the next segment cannot be made, although the mark would still fit."""
    disk = FaultyDisk(random.Random(0))
    store, _ = open_store(DATA, SETTINGS, disk=disk)
    put(store, FIRST, bytes(1400))
    disk.full_from, disk.full_for = disk.space_calls, 1 << 30
    staged = store.log.staged_end
    mark, rest = ready(store, MARKS, b"{}"), [ready(store, FIRST, bytes(500))]
    with pytest.raises(DiskFull):
        put_record_group(store, mark, rest)
    assert (store.log.staged_end, store.queue(*MARKS).next, store.settled) == (staged, 0, True)
    disk.full_from = None
    put_record_group(store, mark, rest)
    store.append()
    assert bodies(store, FIRST) == [bytes(1400), bytes(500)]


def test_the_property_means_nothing_elsewhere() -> None:
    """MQ-107: nor does the bit of a record from which another message is made."""
    disk = FaultyDisk(random.Random(0))
    store, _ = open_store(DATA, SETTINGS, disk=disk)
    tail = record_tail("t", encode_properties([("METAQ_GROUP_END", "F" * 16)]))
    offset = store.put(*ready(store, FIRST, b"like a mark")._replace(tail=tail, keys=()))
    store.put(*ready(store, SECOND, b"like a member", sys_flag=GROUP_MEMBER | 1))
    store.append()
    stored = store.log.record_at(offset)
    assert stored is not None
    assert group_end(stored) is None
    disk.killed()
    damage(disk, offset)
    store, _ = open_store(DATA, SETTINGS, disk=disk)
    assert (bodies(store, FIRST), bodies(store, SECOND)) == ([], [b"like a member"])


# -- recovery ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("roll", [False, True])
def test_a_group_that_is_cut_anywhere_is_gone(roll: bool) -> None:
    """MQ-071, MQ-107, RD-105: the log ends at any byte of a group: the mark goes too, and its places are free again."""
    folder = written(roll=roll, behind=False)
    for at in range(folder.offsets[0], folder.end):
        disk = folder.copy()
        damage(disk, at, until=folder.end)
        store, recovery = folder.opened(disk)
        assert (store.log.end, recovery.gaps) == (folder.offsets[0], []), at
        assert not any(store.log.file(store.log.segments[-1]).read(SEGMENT, folder.offsets[0] % SEGMENT))
        expect_without_group(store, folder)
        assert read_document(disk, DATA / QUARANTINE)[0] is None
        again = put_record_group(store, ready(store, MARKS, b'{"do":"commit"}'), [ready(store, *each) for each in GROUP])
        assert again == folder.offsets
        store.append()
        disk.killed()
        store, _ = folder.opened(disk)
        assert bodies(store, FIRST) == [b"before", b"member one", b"member three"]
        disk.killed()


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("roll", [False, True])
def test_a_whole_group_is_kept(roll: bool, behind: bool, trusted: bool) -> None:
    """MQ-071, MQ-107: cut right behind its last byte, or not cut at all."""
    folder = written(roll=roll, behind=behind, trusted=trusted)
    store, recovery = folder.opened(folder.disk)
    assert (store.log.end, recovery.gaps) == (folder.log_end, [])
    assert bodies(store, FIRST) == [b"before", b"member one", b"member three"]
    assert GROUP[1][1] in bodies(store, SECOND)
    assert bodies(store, MARKS)[1] == b'{"do":"commit"}'


@pytest.mark.parametrize("lost", range(4))
@pytest.mark.parametrize("roll", [False, True])
def test_a_group_of_which_a_record_is_lost_at_the_end_is_cut(roll: bool, lost: int) -> None:
    """MQ-071, MQ-107: what a power cut leaves has holes; the mark alone may be missing."""
    folder = written(roll=roll, behind=False)
    damage(folder.disk, folder.offsets[lost], until=folder.ends[lost])
    store, recovery = folder.opened(folder.disk)
    assert (store.log.end, recovery.gaps, recovery.dropped) == (folder.offsets[0], [], 0)
    expect_without_group(store, folder)


@pytest.mark.parametrize("roll", [False, True])
def test_a_damaged_group_with_records_behind_is_put_into_quarantine(roll: bool) -> None:
    """MQ-071, MQ-107, RD-105: whichever byte is damaged. Its bytes stay, its ordinals and positions are not used again."""
    folder = written(roll=roll, behind=True)
    whole = folder.copy()
    store, _ = folder.opened(whole)
    ends = {key: (store.queue(*key).next, store.queue(*key).text_end) for key in (FIRST, SECOND, MARKS)}
    listed = Gap(folder.offsets[0], folder.behind[0])
    places = [at for start, end in zip(folder.offsets, folder.ends, strict=True) for at in range(start, end)]
    # without the blank record that closes a segment nobody knows that no member stood there
    blank = range(folder.ends[1], folder.ends[1] + BLANK_SIZE * roll)
    for at in (*places, *blank):
        disk = folder.copy()
        damage(disk, at)
        damaged = bytes(disk.content(DATA / LOG / f"{at // SEGMENT * SEGMENT:020d}"))
        store, recovery = folder.opened(disk)
        assert (recovery.gaps, recovery.dropped) == ([listed], 3 + (at in blank)), at
        assert any("kept from readers" in problem for problem in recovery.problems)
        expect_without_group(store, folder)
        for key in (SECOND, MARKS):
            assert bodies(store, key)[-1] == b"behind"
            assert (store.queue(*key).next, store.queue(*key).text_end) == ends[key]
        content, _ = read_document(disk, DATA / QUARANTINE)
        assert content is not None
        assert content["ranges"] == [list(listed)]
        assert bytes(disk.content(DATA / LOG / f"{at // SEGMENT * SEGMENT:020d}")) == damaged


def test_verify_tells_of_a_group_in_quarantine(tmp_path: Path) -> None:
    """MQ-107: how much of it is intact, so that its owner knows that there is something to examine."""
    store, _ = open_store(tmp_path, SETTINGS)
    offsets = put_record_group(
        store, ready(store, MARKS, b"{}"), [ready(store, FIRST, b"lost"), ready(store, SECOND, b"intact")]
    )
    behind = put(store, FIRST, b"behind")
    store.files.clear()
    assert store.lock is not None
    store.lock.close()
    with (tmp_path / LOG / f"{0:020d}").open("r+b") as log:
        log.seek(offsets[1] + 90)
        log.write(b"?")
    store, _ = open_store(tmp_path, SETTINGS)
    store.close()
    said = CliRunner().invoke(verify_command, [str(tmp_path)]).output
    assert f"{behind} bytes in quarantine with 2 intact records of incomplete groups: no damage" in said


@pytest.mark.parametrize("lost", range(4))
@pytest.mark.parametrize("roll", [False, True])
def test_a_group_in_quarantine_stays_there(roll: bool, lost: int) -> None:
    """MQ-071, MQ-107: through a kill before the next checkpoint, new groups, verification, a repair, and an index made anew."""
    folder = written(roll=roll, behind=True)
    disk = folder.disk
    damage(disk, folder.offsets[lost] + 20)
    for _ in range(2):
        store, _ = folder.opened(disk)
        expect_without_group(store, folder)
        disk.killed()
    store, _ = folder.opened(disk)
    put_record_group(
        store, ready(store, MARKS, b"second"), [ready(store, FIRST, b"later one"), ready(store, FIRST, b"later two")]
    )
    store.append()
    store.index_keys()
    store.close()
    report = verify(DATA, disk)
    assert not report.damages
    assert report.dropped == 3
    assert roll or report.quarantined_bytes == folder.behind[0] - folder.offsets[0]
    assert not repair(DATA, disk).damages
    store, _ = folder.opened(disk)
    expect_without_group(store, folder)
    assert bodies(store, FIRST)[-2:] == [b"later one", b"later two"]
    store.close()
    assert not verify(DATA, disk).damages


def test_before_the_trusted_mark_damage_costs_one_record() -> None:
    """MQ-107: the group was whole once, so its other records are what was acknowledged."""
    for lost in range(4):
        folder = written(roll=False, behind=False, trusted=True)
        damage(folder.disk, folder.offsets[lost] + 50)
        store, recovery = folder.opened(folder.disk)
        assert recovery.dropped == 0
        expected = [b'{"do":"commit"}', *(body for _, body in GROUP)]
        got = {body for key in (MARKS, FIRST, SECOND) for body in bodies(store, key)}
        assert [body for body in expected if body not in got] == [expected[lost]]
        folder.disk.killed()


def test_groups_behind_one_another() -> None:
    """MQ-107: a torn one before a whole one goes into quarantine, before another torn one at the end it is cut off with it."""
    for tear_second in (False, True):
        disk = FaultyDisk(random.Random(0))
        store, _ = open_store(DATA, SETTINGS, disk=disk)
        groups = []
        for name in (b"a", b"b"):
            members = [ready(store, FIRST, name + b"1"), ready(store, FIRST, name + b"2")]
            groups.append(put_record_group(store, ready(store, MARKS, name), members))
        store.append()
        disk.killed()
        damage(disk, groups[0][1] + 3)
        if tear_second:
            damage(disk, groups[1][2] + 3)
        store, recovery = open_store(DATA, SETTINGS, disk=disk)
        if tear_second:
            assert (store.log.end, recovery.gaps, bodies(store, FIRST), bodies(store, MARKS)) == (0, [], [], [])
        else:
            assert recovery.gaps == [Gap(0, groups[1][0])]
            assert bodies(store, FIRST) == [None, b"b1", b"b2"]  # a queue begins with the first record that is intact
            assert bodies(store, MARKS) == [None, b"b"]


def test_new_records_where_a_range_was_in_quarantine() -> None:
    """MQ-107: when the log is later cut before what stood behind a listed range, the range is listed no longer."""
    folder = written(roll=False, behind=True)
    disk = folder.disk
    damage(disk, folder.offsets[2] + 3)
    folder.opened(disk)
    disk.killed()
    damage(disk, folder.behind[0], until=folder.log_end)
    store, _ = folder.opened(disk)
    assert store.log.end == folder.offsets[0]
    content, _ = read_document(disk, DATA / QUARANTINE)
    assert content is not None
    assert content["ranges"] == []
    assert put(store, FIRST, b"new") == folder.offsets[0]
    disk.killed()
    store, _ = folder.opened(disk)
    assert bodies(store, FIRST)[-1] == b"new"


def test_members_outlive_their_mark(tmp_path: Path) -> None:
    """MQ-107: retention deletes the segment of a mark; its members in the next one stay, without any checkpoint too."""
    store, _ = open_store(tmp_path, SETTINGS)
    put(store, FIRST, b"before")
    put(store, SECOND, b"padding".ljust(SEGMENT - store.log.end - 640, b"."))
    offsets = put_record_group(
        store, ready(store, MARKS, b"{}"), [ready(store, FIRST, bytes(100)), ready(store, FIRST, b"m" * 200)]
    )
    store.append()
    assert offsets[1] < SEGMENT == offsets[2]
    store.close()
    for path in [tmp_path / LOG / f"{0:020d}", *tmp_path.glob("checkpoint*")]:
        path.unlink()
    shutil.rmtree(tmp_path / "consumequeue")
    store, recovery = open_store(tmp_path, SETTINGS)
    assert (store.log.begin, recovery.dropped) == (SEGMENT, 0)
    assert bodies(store, FIRST) == [b"m" * 200]
    store.close()
