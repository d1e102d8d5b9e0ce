"""The registry's key-value table: namespace → key → value, the only state of a registry that survives a restart.

It is kept in ``kvConfig.json``, in RocketMQ's form and with the checksum that all control files carry.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from metaq.errors import BadRequest
from metaq.store.files.disk import Disk
from metaq.store.files.documents import read_document, write_document
from metaq.store.files.filecache import Run

FILE: Final = "kvConfig.json"
MAX_KEYS: Final = 100_000

Tables = dict[str, dict[str, str]]


class KvConfig:
    """All keys of a registry. A change takes effect once it is durable; the caller makes one change at a time."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        """Read the file, or its previous version when it is damaged: ``problems`` then says so."""
        self._disk = disk
        self.path = directory / FILE
        content, self.problems = read_document(disk, self.path)
        self._tables: Tables = {} if content is None else content["configTable"]

    def table(self, namespace: str) -> Mapping[str, str] | None:
        """Return the keys of a namespace; ``None`` when it never had one."""
        return self._tables.get(namespace)

    def get(self, namespace: str, key: str) -> str | None:
        return self._tables.get(namespace, {}).get(key)

    def put(self, namespace: str, key: str, value: str, run: Run) -> None:
        """Set a key durably; on an error the table stays as it was.

        Raises ``BadRequest`` when there are ``MAX_KEYS`` keys already, and ``StoreError`` when it cannot be written.
        """
        if key not in self._tables.get(namespace, {}) and sum(map(len, self._tables.values())) >= MAX_KEYS:
            raise BadRequest(f"there are already {MAX_KEYS} keys; delete some first")
        self._change({**self._tables, namespace: {**self._tables.get(namespace, {}), key: value}}, run)

    def delete(self, namespace: str, key: str, run: Run) -> None:
        """Remove a key durably; do nothing when it does not exist."""
        before = self._tables.get(namespace, {})
        if key in before:
            kept = {other: value for other, value in before.items() if other != key}
            self._change({**self._tables, namespace: kept}, run)

    def _change(self, tables: Tables, run: Run) -> None:
        run(lambda: self._disk.make_directories(self.path.parent))
        run(lambda: write_document(self._disk, self.path, {"configTable": tables}))
        self._tables = tables
