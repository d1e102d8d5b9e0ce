"""A process that applies numbered batches to an ordered index until it is killed.

``python -m tests.store.ordered.writer FOLDER ENGINE SEED`` goes on after the batch that the index covers, and prints the number
of each batch once it is applied.
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

from metaq.store.ordered.engine import DeleteKey, DeleteRange, Operation, SetKey
from metaq.store.ordered.ordered import Covered, EngineName, Ordered, open_ordered

ENGINES: Final[tuple[EngineName, ...]] = ("rocksdict", "sqlite3")
END: Final = b"\xff"
WRITE_BUFFER_BYTES: Final = 64 * 1024
"""So small that RocksDB flushes by itself, several times a second."""


def open_small(folder: Path, engine: EngineName) -> tuple[Ordered, str | None]:
    return open_ordered(folder, engine, cache_bytes=1024**2, write_buffer_bytes=WRITE_BUFFER_BYTES)


def batch(seed: int, number: int) -> list[Operation]:
    """Return the operations of a batch: some keys of 5,000 are put, some deleted one by one or as a range."""
    rng = random.Random(seed << 32 | number)
    operations: list[Operation] = [SetKey(b"N", b"%d" % number)]
    for _ in range(rng.randrange(30)):
        key = rng.randrange(5000)
        match rng.randrange(12):
            case 0:
                operations.append(DeleteKey(b"T%04d" % key))
            case 1:
                operations.append(DeleteRange(b"T%04d" % key, b"T%04d" % (key + rng.randrange(60))))
            case _:
                operations.append(SetKey(b"T%04d" % key, rng.randbytes(rng.randrange(40))))
    return operations


def covered(seed: int, number: int) -> Covered:
    return Covered(number, random.Random(seed << 32 | number).getrandbits(32))


def enter(model: dict[bytes, bytes], operations: Sequence[Operation]) -> None:
    """Do to a dictionary what a batch does to an index."""
    for operation in operations:
        if isinstance(operation, SetKey):
            model[operation.key] = operation.value
        elif isinstance(operation, DeleteKey):
            model.pop(operation.key, None)
        else:
            for key in [key for key in model if operation.begin <= key < operation.end]:
                del model[key]


def entries(index: Ordered) -> dict[bytes, bytes]:
    """Return all entries but those in which the index speaks of itself, read in slices."""
    found: list[tuple[bytes, bytes]] = []
    with index.scan(b"B", END) as scan:
        while part := scan.next(256):
            found += part
    keys = [key for key, _ in found]
    assert keys == sorted(set(keys))
    return dict(found)


def main() -> None:
    folder, engine, seed = Path(sys.argv[1]), cast(EngineName, sys.argv[2]), int(sys.argv[3])
    index, reason = open_small(folder, engine)
    assert reason is None, reason
    number = 0 if index.covered is None else index.covered.log_offset
    rng = random.Random()
    while True:
        if index.apply(batch(seed, number + 1), covered(seed, number + 1)):
            number += 1
            print(number, flush=True)
        if rng.random() < 0.01:
            index.flush()


if __name__ == "__main__":
    main()
