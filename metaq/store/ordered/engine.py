"""The parts that the engines of the ordered index share: the operations of a batch, and the protocol of an engine."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class SetKey(NamedTuple):
    """Set the value of a key."""

    key: bytes
    value: bytes = b""


class DeleteKey(NamedTuple):
    """DeleteKey a key; nothing happens when it is not there."""

    key: bytes


class DeleteRange(NamedTuple):
    """DeleteKey all keys from ``begin`` on and before ``end``. To include a last key, append a zero byte to it."""

    begin: bytes
    end: bytes


Operation = SetKey | DeleteKey | DeleteRange
Entry = tuple[bytes, bytes]
"""A key and its value."""


class Cursor(Protocol):
    """A walk through a part of the index, as it was when the cursor was made."""

    def next(self, most: int) -> list[Entry]:
        """Return the next entries, at most ``most`` of them; fewer only at the end. Raises ``IndexFailed``."""
        ...

    def close(self) -> None:
        """Release what the cursor holds; it may be closed already."""
        ...


class IndexEngine(Protocol):
    """An index in a folder of its own. All methods but ``close`` raise ``IndexFailed`` for damage and failures of the disk.

    No method may be called while ``close`` is at work, or after it.
    """

    waits: bool
    """True when ``write`` and cursors may wait for the disk, so that they belong where a system call may wait."""

    def write(self, batch: Sequence[Operation]) -> bool:
        """Apply the operations in their order, all or none of them; return false, with none applied, instead of waiting."""
        ...

    def cursor(self, begin: bytes, end: bytes) -> Cursor:
        """Return a cursor over the keys from ``begin`` on and before ``end``."""
        ...

    def files(self, begin: bytes, end: bytes) -> list[str]:
        """Return the files that such a cursor reads, if it would wait for those that are not in memory."""
        ...

    def find(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the value of each key, or ``None``."""
        ...

    def may_have(self, keys: Sequence[bytes]) -> bool:
        """Return false when certainly none of the keys is there, without waiting for the disk."""
        ...

    def flush(self) -> None:
        """Make durable what has been written. Raises ``DiskFull`` when there is no room."""
        ...

    def size_bytes(self) -> int:
        """Return the size of the files, without waiting for the disk."""
        ...

    def close(self) -> None:
        """Flush, and release the folder, also when that raises ``IndexFailed`` or ``DiskFull``."""
        ...
