"""A finished data folder to damage, and what a store opened on it must still deliver."""

import random
from typing import NamedTuple

from metaq.message import TopicPartition
from metaq.store.checkpoint import read_checkpoint
from metaq.store.files.filecache import read_here
from metaq.store.messagestore import MessageStore
from metaq.store.recovery.recovery import open_store
from metaq.store.settings import StoreSettings
from tests.crash.command import expect
from tests.crash.driver import Driver, random_settings
from tests.crash.model import Sent, compare, delivered
from tests.support.faultydisk import DATA, FaultyDisk


class Place(NamedTuple):
    """One message of the folder and where its record is."""

    key: TopicPartition
    ordinal: int
    sent: Sent
    size: int
    group: int | None
    """The number of the group of records that it belongs to."""

    @property
    def end(self) -> int:
        return self.sent.log_offset + self.size


class Folder(NamedTuple):
    """A data folder that no process uses."""

    disk: FaultyDisk
    settings: StoreSettings
    places: list[Place]
    """Its messages by log offset, those whose record retention has deleted left out."""
    stopped: bool
    """In order; else the process was killed after a sweep."""
    begin: int
    mark: int
    """What the checkpoint says: the log before it was whole."""

    def falls_with(self, place: Place, *, reboot: bool) -> list[Place]:
        """The messages that cannot be kept without this one: its group, unless something tells that it was whole once."""
        group = [other for other in self.places if other.group == place.group is not None]
        known = self.stopped or not reboot or not group or group[0].sent.log_offset < self.mark
        return [place] if known else group


def make_folder(rng: random.Random, steps: int) -> Folder:
    """Work a while, then stop in order or be killed after everything was swept to the page cache."""
    driver = Driver(rng, FaultyDisk(rng), random_settings(rng))
    driver.open()
    driver.put()
    driver.checkpoint()
    driver.write_document()
    driver.write_document()
    for _ in range(steps):
        driver.step()
    driver.interleaved = False
    driver.put()
    driver.sync()
    driver.sweep()
    store = driver.store
    groups = {place: number for number, group in enumerate(driver.model.groups) for place in group}
    places = []
    for key, track in driver.model.tracks.items():
        queue = store.queue(*key)
        for ordinal, sent in enumerate(track.sent):
            if sent is not None and sent.log_offset >= store.log.begin:
                places.append(Place(key, ordinal, sent, queue.unit(ordinal, read_here)[1], groups.get((key, ordinal))))
    places.sort(key=lambda place: place.sent.log_offset)
    begin = store.log.begin
    stopped = rng.random() < 0.5
    if stopped:
        store.close()
    driver.ended(power=False)
    checkpoint, _ = read_checkpoint(driver.disk, DATA)
    assert checkpoint is not None
    return Folder(driver.disk, driver.settings, places, stopped, begin, checkpoint.mark)


def reopen(folder: Folder, disk: FaultyDisk) -> MessageStore:
    """Open the folder as a damaged copy has it."""
    store, _ = open_store(DATA, folder.settings, disk=disk)
    expect(store.failure is None, "a damaged folder opens and takes messages", store.failure)
    return store


def lost_messages(folder: Folder, store: MessageStore) -> list[Place]:
    """The messages that a reader does not get; those that it gets are as they were put."""
    lost = []
    answers = {}
    for key in {place.key for place in folder.places}:
        queue = store.queue(*key)
        answers[key] = dict(delivered(store, queue))
    for place in folder.places:
        stored = answers[place.key].pop(place.ordinal, None)
        if stored is None:
            lost.append(place)
        else:
            compare(store.queue(*place.key), place.ordinal, place.sent, stored, store.epoch << 47)
    surplus = {key: [ordinal for ordinal, stored in rest.items() if stored is not None] for key, rest in answers.items()}
    expect(not any(surplus.values()), "nothing is delivered that was not put", surplus)
    return lost
