"""The inspection of a folder's marks, definitions and runs, as ``metaq verify`` makes it."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner

from metaq.checksum import body_crc
from metaq.cli.host.verify import verify as verify_command
from metaq.message import TopicPartition
from metaq.protocol.properties import CRON, TIMER
from metaq.protocol.record import constant_middle, encode_properties, host_bytes, record_tail
from metaq.protocol.text.messages import HEADER_SIZE_TEXT
from metaq.store.messagestore import MessageStore
from metaq.store.newrecord import NewRecord
from metaq.store.recordgroups import END_SIZE, put_record_group
from metaq.store.recovery.recovery import open_store
from metaq.store.recovery.verify import Damage, verify
from metaq.store.settings import StoreSettings
from metaq.timers.definitions import Recurring, define_mark, undefine_mark
from metaq.timers.inspecting import TimerInspection
from metaq.timers.records import MARKS, PARKS, Ended, deliver_mark, key_of, properties_of_park

HOST: Final = host_bytes("127.0.0.1", 8123)
DUE_MS: Final = 1_700_000_000_000
TICK: Final = Recurring("tick", "@every 1m", "orders", b"body", zone="Mars/Base")
"""Its zone is one that this machine does not know, which is no damage."""


def new(store: MessageStore, key: TopicPartition, body: bytes, pairs: dict[str, str] | None = None) -> NewRecord:
    return NewRecord(
        queue=store.queue(*key),
        flag=0,
        body=body,
        crc=body_crc(body),
        middle=constant_middle(0, DUE_MS, HOST, DUE_MS, HOST),
        text_size=HEADER_SIZE_TEXT + len(body),
        tail=record_tail(key.topic, encode_properties((pairs or {}).items())),
    )


def run(store: MessageStore, number: int, **more: str) -> NewRecord:
    """A run of the definition with a number."""
    return new(store, PARKS, b"body", {**more, **properties_of_park(DUE_MS, "orders", 0), CRON: f"tick:{number}"})


def define(store: MessageStore, changed: dict[str, Any] | None = None, runs: int = 1, *, wrong: int = 0) -> int:
    """Stage a definition, some members of its mark changed; return its log offset."""
    mark = new(store, MARKS, json.dumps(json.loads(define_mark(TICK)) | (changed or {})).encode())
    size = mark.size + END_SIZE
    number = store.log.end_of([size]) - size
    return put_record_group(store, mark, [run(store, number + wrong) for _ in range(runs)])[0]


def inspected(folder: Path) -> list[Damage]:
    return verify(folder, inspect=TimerInspection().record).damages


def test_whole_groups_are_right(tmp_path: Path) -> None:
    """E-10, E-13: defined, delivered with its next run, stored again, and ended."""
    store, _ = open_store(tmp_path, StoreSettings(segment_bytes=64 * 1024))
    place = define(store)
    orders = TopicPartition("orders", 0)
    group = [new(store, orders, b"body"), run(store, place)]
    put_record_group(store, new(store, MARKS, deliver_mark(key_of(DUE_MS, place), 1, 0, {0: 1})), group)
    store.put(*run(store, place, **{TIMER: f"{place}:{place}:{DUE_MS}"}))
    store.put(*new(store, MARKS, define_mark(TICK, None, place)))
    store.put(*new(store, MARKS, undefine_mark("tick", Ended(place, key_of(DUE_MS, place), place))))
    store.append()
    store.close()
    assert inspected(tmp_path) == []


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"missed": "some"}, "missed is 'some'"),
        ({"cron": "* * *"}, "has 3 fields"),
        ({"body": 7}, "cannot be read"),
        ({"name": "a b"}, "the name 'a b'"),
        ({"partition": "x"}, "cannot be read"),
        ({"replaced": [1, 2]}, "cannot be read"),
        ({"do": "redefine"}, "of an unknown kind"),
    ],
)
def test_a_mark_that_cannot_be_read_is_named(tmp_path: Path, changed: dict[str, Any], text: str) -> None:
    """E-10, E-13: its checksum is right, and its content is not; the store itself sees nothing."""
    store, _ = open_store(tmp_path, StoreSettings(segment_bytes=64 * 1024))
    define(store)
    place = define(store, changed)
    store.append()
    store.close()
    assert verify(tmp_path).damages == []
    (damage,) = inspected(tmp_path)
    assert (damage.path.parent.name, damage.offset) == ("commitlog", place)
    assert text in damage.text
    done = CliRunner().invoke(verify_command, [str(tmp_path)], standalone_mode=False)
    assert done.return_value == 1
    assert f"{damage.path} {place}: " in done.stdout


def test_a_group_that_is_not_a_definition_with_its_run_is_named(tmp_path: Path) -> None:
    """E-10, E-13: no run, a run of another one, two runs, a run outside of any group, and a delivery with another's message."""
    store, _ = open_store(tmp_path, StoreSettings(segment_bytes=64 * 1024))
    places = [define(store, runs=0), define(store, wrong=1), define(store, runs=2)]
    places.append(store.put(*run(store, places[2])))
    park = new(store, PARKS, b"", properties_of_park(DUE_MS, "orders", 0))
    places += put_record_group(store, new(store, MARKS, deliver_mark(key_of(DUE_MS, 0), 0, 0, {})), [park])[:1]
    store.put(*new(store, PARKS, b"", properties_of_park(DUE_MS, "orders", 0)))
    store.append()
    store.close()
    found = inspected(tmp_path)
    assert [damage.offset for damage in found] == places
    words = (
        "no first run",
        "does not consist of its first run",
        "does not consist",
        "belongs to no group",
        "no run of a definition",
    )
    assert all(word in damage.text for word, damage in zip(words, found, strict=True))
