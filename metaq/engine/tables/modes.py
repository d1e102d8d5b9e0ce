"""The table of request modes: how the members of a group get the messages of a topic, where that was set (401).

It is kept in ``config/messageRequestMode.json`` in RocketMQ's form. Without a row the mode is PULL.
"""

import enum
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from metaq.engine.tables.topics import FOLDER
from metaq.errors import BadRequest, Overloaded
from metaq.protocol.remoting.fastjson import number_of, text_of
from metaq.store.files.disk import Disk
from metaq.store.files.documents import read_document, write_document
from metaq.store.files.filecache import Run

logger = logging.getLogger(__name__)

MODES: Final = "messageRequestMode.json"
MOST_MODES: Final = 16_384
_TABLE: Final = "messageRequestModeMap"


class Mode(enum.StrEnum):
    """How consumers get messages: from offsets that they keep, or as leases from the broker."""

    PULL = "PULL"
    POP = "POP"


class RequestMode(NamedTuple):
    """The mode of a group in a topic: the body of 401."""

    topic: str
    group: str
    mode: Mode = Mode.PULL
    pop_share: int = 0
    """In mode POP: a member also pops the queues of so many members after it; 0 or less: all queues."""

    def row(self) -> dict[str, Any]:
        """Return the mode in the form of request bodies and the file."""
        return {"consumerGroup": self.group, "mode": self.mode, "popShareQueueNum": self.pop_share, "topic": self.topic}


def mode_of(row: Mapping[str, Any]) -> RequestMode:
    """Return the mode that a row of a request body or the file describes. Raise ``BadRequest`` for a wrong one."""
    name = text_of(row, "mode")
    if name not in set(Mode):
        raise BadRequest(f"mode is {name[:40]!r}, neither {Mode.PULL} nor {Mode.POP}")
    topic, group = text_of(row, "topic"), text_of(row, "consumerGroup")
    return RequestMode(topic, group, Mode(name), number_of(row, "popShareQueueNum", 0))


class ModeTable:
    """All modes that were set on this broker. Changes take effect at once, and are durable after the next ``save``."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FOLDER / MODES
        self._modes: dict[tuple[str, str], RequestMode] = {}
        self._version = 0
        self._saved_version = 0

    def __len__(self) -> int:
        return len(self._modes)

    def get(self, topic: str, group: str) -> RequestMode:
        return self._modes.get((topic, group), RequestMode(topic, group))

    def put(self, mode: RequestMode) -> None:
        """Set the mode of a group in a topic. Raise ``Overloaded`` beyond ``MOST_MODES``."""
        key = mode.topic, mode.group
        if self._modes.get(key) == mode:
            return
        if key not in self._modes and len(self._modes) >= MOST_MODES:
            reason = f"the modes of {MOST_MODES} groups in topics are set already; delete groups that are not used any more"
            raise Overloaded(reason, retry_after_ms=60_000)
        self._modes[key] = mode
        self._version += 1

    def forget(self, *, topic: str | None = None, group: str | None = None) -> None:
        """Drop the modes of a topic, or of a group, that is deleted."""
        kept = {key: mode for key, mode in self._modes.items() if topic != mode.topic and group != mode.group}
        if len(kept) != len(self._modes):
            self._modes = kept
            self._version += 1

    # -- the file -----------------------------------------------------------------------------------------------------

    def load(self, disk: Disk) -> list[str]:
        """Read the file; return the problems that were found in it."""
        content, problems = read_document(disk, self._path)
        if content is not None:
            rows = [mode_of(row) for groups in content[_TABLE].values() for row in groups.values()]
            self._modes = {(mode.topic, mode.group): mode for mode in rows}
        if problems:
            self._version += 1
        return problems

    def reload(self, disk: Disk) -> None:
        """Replace the table by the file that replication has written."""
        self._modes = {}
        for problem in self.load(disk):
            logger.error("table of request modes damaged problem=%s", problem)

    @property
    def unsaved(self) -> bool:
        return self._version != self._saved_version

    def save(self, disk: Disk, _: int, run: Run) -> None:
        """Write the table as it is now to the file, durably."""
        version, content = self._version, self.content()
        run(lambda: disk.make_directories(self._path.parent))
        run(lambda: write_document(disk, self._path, content))
        self._saved_version = version

    def content(self) -> dict[str, Any]:
        """Return the table in the form of the file and of the answer to 402: topic → group → row."""
        rows: dict[str, dict[str, Any]] = {}
        for topic, group in sorted(self._modes):
            rows.setdefault(topic, {})[group] = self._modes[topic, group].row()
        return {_TABLE: rows}
