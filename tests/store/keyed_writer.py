"""A process that puts messages with keys until it is killed: ``python -m tests.store.keyed_writer FOLDER FIRST SEED``.

It prints ``number log-offset`` for each message once that is written; message n has the keys ``u<n>`` and ``k<n mod 1000>``.
"""

import random
import sys
import zlib
from pathlib import Path
from typing import Final

from metaq.message import Durability
from metaq.protocol.keys import KEYS, UNIQ_KEY, keys_of
from metaq.protocol.record import constant_middle, encode_properties, host_bytes, record_tail
from metaq.protocol.text.messages import HEADER_SIZE_TEXT
from metaq.store.log.retention import RetentionRules
from metaq.store.messagestore import MessageStore
from metaq.store.recovery.recovery import open_store
from metaq.store.settings import StoreSettings

SETTINGS: Final = StoreSettings(
    segment_bytes=256 * 1024,
    index_slots=500,
    index_entries=5000,
    durability=Durability.MEMORY,
    open_files=8,
    retention=RetentionRules(ample_free_bytes=0),  # however full the disk is
)
HOST: Final = host_bytes("127.0.0.1", 10911)


def stage(
    store: MessageStore, topic: str, body: bytes, pairs: list[tuple[str, str]], partition: int = 0, sys_flag: int = 0
) -> int:
    """Stage one message with properties, some of which are keys; returns its log offset."""
    properties = encode_properties(pairs)
    now_ms = store.clock.now_ms()
    return store.put(
        queue=store.queue(topic, partition),
        flag=0,
        body=body,
        crc=zlib.crc32(body) & 0x7FFFFFFF,
        middle=constant_middle(sys_flag, now_ms, HOST, now_ms, HOST),
        text_size=HEADER_SIZE_TEXT + len(body),
        tail=record_tail(topic, properties),
        keys=keys_of(topic, sys_flag, properties),
    )


def put(store: MessageStore, number: int) -> int:
    """Stage one message; returns its log offset."""
    return stage(store, "t", b"%d" % number, [(KEYS, f"k{number % 1000}"), (UNIQ_KEY, f"u{number}")], number % 3)


def main() -> None:
    folder, number, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    store, _ = open_store(folder, SETTINGS)
    duties = (store.sweep, store.index_keys, store.index_keys, store.checkpoint)
    while True:
        count = rng.choice((1, 5, 30))
        placed = [(number + more, put(store, number + more)) for more in range(count)]
        store.append()
        number += count
        print("".join(f"{each} {offset}\n" for each, offset in placed), end="", flush=True)
        if rng.random() < 0.1:
            rng.choice(duties)()


if __name__ == "__main__":
    main()
