"""Power cuts of real processes take the data that no sync has covered, and nothing else."""

import random
from pathlib import Path

import pytest

from metaq.client import TextClient
from metaq.store.files.disk import Disk, replace_file
from tests.support.faultydisk import DATA, ROOT, FaultyDisk
from tests.support.powercuts import How, PowerDisk, PoweredBroker, cut, cut_power

STEPS = 60
NAMES = ("a", "b", "c")


def step(disk: Disk, rng: random.Random, data: Path) -> None:
    """Anything that a store does."""
    path = data / rng.choice(("", "in", "in/side")) / rng.choice(NAMES)
    content, at, size = rng.randbytes(rng.choice((1, 700, 5000))), rng.randrange(3000), rng.randrange(8000)
    disk.make_directories(path.parent, durable=rng.random() < 0.5)
    file = disk.open(path)
    match rng.randrange(8):
        case 0 | 1 | 2:
            file.write(content, at)
        case 3:
            file.allocate(size) if rng.random() < 0.5 else file.truncate(size)
        case 4:
            file.datasync() if rng.random() < 0.8 else file.sync_file_system()
        case 5:
            replace_file(disk, path, content) if rng.random() < 0.5 else disk.replace(path, path.with_name("moved"))
        case 6:
            disk.unlink(path)
        case _:
            disk.sync_directory(path.parent)
    file.close()


@pytest.mark.parametrize("seed", range(12))
def test_what_is_left_is_what_the_disk_in_memory_leaves(tmp_path: Path, seed: int) -> None:
    """The same calls to both disks, processes that are killed meanwhile, and a cut that takes all it may."""
    model, data = FaultyDisk(random.Random(seed)), tmp_path / "data"
    model.make_directories(DATA)
    data.mkdir()
    disk = PowerDisk(data)
    for number in range(STEPS):
        step(model, random.Random(f"{seed} {number}"), DATA)
        step(disk, random.Random(f"{seed} {number}"), data)
        if random.Random(f"killed {seed} {number}").random() < 0.1:
            disk = PowerDisk(data)
    image = FaultyDisk(random.Random(0))
    image._adopt(str(ROOT), model._folders[str(ROOT)].after_cut(random.Random(0), 0.0))
    cut(data, random.Random(seed), "all")
    left = {path.relative_to(data): path.read_bytes() for path in data.rglob("*") if path.is_file()}
    assert left == {path.relative_to(DATA): bytes(content) for path, content in image.files()}


def test_a_hole_is_in_the_middle(tmp_path: Path) -> None:
    """Begin and end of what was not synced stay."""
    (tmp_path / "data").mkdir()
    disk = PowerDisk(tmp_path / "data")
    file = disk.open(tmp_path / "data" / "log")
    file.write(b"1" * 512, 0)
    file.datasync()
    file.write(b"2" * 512 * 9, 512)
    before = disk.boot_id()
    assert cut(tmp_path / "data", random.Random(1), "middle") == 3
    content = (tmp_path / "data" / "log").read_bytes()
    assert content == b"1" * 512 + b"2" * 512 * 3 + bytes(512 * 3) + b"2" * 512 * 3
    assert PowerDisk(tmp_path / "data").boot_id() != before


@pytest.mark.parametrize(("durability", "how"), [("memory", "all"), ("memory", "middle"), ("disk", "some")])
def test_a_broker_loses_what_it_has_not_synced(tmp_path: Path, durability: str, how: How) -> None:
    """Nothing by a kill; by a power cut something at `memory`, nothing at `disk`."""
    with PoweredBroker(tmp_path / "data", durability=durability) as broker:
        with TextClient(broker.host, broker.port) as client:
            client.create("t", 1)
            put = [client.put("t", b"%d" % number, partition=0).id for number in range(100)]
        broker.restart()
        assert read(broker) == put
        taken = cut_power(broker, random.Random(1), how)
        broker.start()
        assert (read(broker) == put) == (durability == "disk"), taken


def read(broker: PoweredBroker) -> list[int]:
    """The ids of all messages that it has."""
    with TextClient(broker.host, broker.port) as client:
        return [message.id for message in client.iterate("t", partition=0)]
