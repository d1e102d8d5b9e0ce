"""Local transactions: a table of those that belong to connections, without any I/O (specs: text protocol, section 5.2)."""

from collections.abc import Hashable
from typing import Generic, TypeVar

from metaq.tx.openbranches import Counts, OpenBranch, OpenBranches, Room
from metaq.tx.xacodes import XaCode, XaError

T = TypeVar("T")


class LocalBranches(Generic[T]):
    """Transactions that belong to a connection, their *owner*: each owner sees only its own, and they end with it.

    They are not in the log before they commit, so every command takes effect at once. When the messages that ``commit`` returns
    cannot be stored, the transaction is gone all the same: it counts as rolled back.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._open: OpenBranches[tuple[Hashable, str], T] = OpenBranches(room)
        self._keys: dict[Hashable, set[str]] = {}

    def begin(self, owner: Hashable, key: str, now_s: float, timeout_s: float) -> None:
        """Open a transaction that expires after ``timeout_s``, never when that is 0; one that exists stays as it is.

        ``XaError`` (RMERR) when there are too many.
        """
        if (owner, key) not in self._open:
            self._room.check_branches(len(self._open))
            self._open.begin((owner, key), now_s, timeout_s)
            self._keys.setdefault(owner, set()).add(key)

    def open(self, owner: Hashable, key: str) -> OpenBranch[T]:
        """Return an open transaction, valid until the next command. ``XaError`` (NOTA) when it is not open."""
        branch = self._open.get((owner, key))
        if branch is None:
            raise XaError(XaCode.NOTA, f"Local transaction '{key}' has not been started.", bare=True)
        return branch

    def put(self, owner: Hashable, key: str, message: T, size: int) -> None:
        """Add a message of ``size`` bytes. ``XaError`` (RMERR) when that would exceed a limit; the transaction stays open."""
        self.open(owner, key).put(message, size)

    def prepare(self, owner: Hashable, key: str) -> None:
        """Raise ``XaError``: a local transaction has only one phase."""
        self.open(owner, key)
        raise XaError(XaCode.RMERR, "Prepare not implemented on Local Transactions.")

    def commit(self, owner: Hashable, key: str) -> list[T]:
        """End a transaction, in one phase or two; return its messages to make visible. ``XaError`` (NOTA) if it is not open."""
        self.open(owner, key)
        self._forget_key(owner, key)
        return self._open.close((owner, key))

    def rollback(self, owner: Hashable, key: str) -> None:
        """Drop a transaction and its messages. ``XaError`` (NOTA) when it is not open."""
        self.open(owner, key)
        self._forget_key(owner, key)
        self._open.close((owner, key))

    def forget(self, key: str) -> None:
        """Raise ``XaError``: FORGET is for XA branches."""
        raise XaError(XaCode.NOTA, f"{key} is not a valid xid")

    def close(self, owner: Hashable) -> int:
        """Roll back the transactions that a connection leaves open; return how many."""
        keys = self._keys.pop(owner, set())
        for key in keys:
            self._open.close((owner, key))
        return len(keys)

    def expire(self, now_s: float) -> list[str]:
        """Roll back the transactions whose timeout has passed; return their keys."""
        due = self._open.due(now_s)
        for owner, key in due:
            self.rollback(owner, key)
        return [key for _, key in due]

    def counts(self) -> Counts:
        """Return the number of transactions: all of them are open."""
        return Counts(len(self._open), 0, 0, self._open.oldest_s)

    def _forget_key(self, owner: Hashable, key: str) -> None:
        keys = self._keys[owner]
        keys.discard(key)
        if not keys:
            del self._keys[owner]
