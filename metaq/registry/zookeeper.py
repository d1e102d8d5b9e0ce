"""A ZooKeeper session that keeps this process's ephemeral nodes in place and reports changes of watched nodes.

The keeper, a greenlet or thread of its own, does all of this, never a callback of kazoo:

- it makes ephemeral nodes again that were lost with their session, or that somebody removed;
- it looks at watched nodes again after every change and every reconnection.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import eq
from typing import Any, Final

from metaq.errors import MetaqError, RegistryUnavailable
from metaq.registry.session import CreateNode, DeleteNode, ZooKeeperSession

logger = logging.getLogger(__name__)

UNSETTLED_S: Final = 0.25
"""The pause before a failed step is tried again."""
AT_ONCE: Final = 200
"""The most requests that are under way together."""


@dataclass(slots=True, eq=False)
class _Kept:
    """An ephemeral node that this process keeps in place."""

    path: str
    data: Callable[[], bytes]
    after: str | None
    same: Callable[[bytes, bytes], bool]
    seen: Callable[[object], None] = field(init=False)
    unsettled: bool = True
    written: bytes = b""
    session: int | None = None
    """The session in which it was written; ``None`` when it is not in place."""
    complaint: str = ""
    """The last logged reason why it is not in place."""


@dataclass(slots=True, eq=False)
class _Watched:
    """A watched path, and the function to call after a change."""

    path: str
    changed: Callable[[], None]
    seen: Callable[[object], None] = field(init=False)
    unsettled: bool = True


class ZooKeeper(ZooKeeperSession):
    """A session with a keeper, which maintains nodes and watches."""

    def __init__(self, *arguments: Any) -> None:
        """Create it, with the arguments of ``ZooKeeperSession``."""
        super().__init__(*arguments)
        self._guard = self._tasks.lock_object()  # guards the tables that follow; nothing blocks while it is held
        self._kept: dict[str, _Kept] = {}
        self._watched: dict[_Watched, None] = {}  # in the order of the calls
        self._dropped: set[str] = set()
        self.connected_at = 0.0
        """The monotonic time when the connection was last made."""

    def start(self) -> None:
        """Start the keeper, which connects, however long that takes, and keeps nodes in place; return at once."""
        self._tasks.spawn(self._keep)

    def keep(
        self,
        path: str,
        data: Callable[[], bytes],
        *,
        after: str | None = None,
        same: Callable[[bytes, bytes], bool] = eq,
    ) -> None:
        """Keep an ephemeral node at ``path`` from now on, with its parents: it is made again whenever it is lost.

        Args:
            path: the node's path.
            data: returns the node's data; the keeper calls it whenever it makes the node, and after ``touch``.
            after: the path of another kept node that has to be in place first: its holder may have this one, too.
            same: called with the data found and our own when a node of another session is in the place. If it returns true
                the node counts as our own and is replaced at once. Otherwise the keeper logs it and waits until it is gone.
        """
        kept = _Kept(path, data, after, same)
        kept.seen = partial(self._note, kept)
        with self._guard:
            self._kept[path] = kept
            self._dropped.discard(path)
        self._wake.set()

    def touch(self, path: str) -> None:
        """Have a kept node deleted and made anew, in one transaction, since its data has changed.

        A change of the data alone would not do: MetaQ's clients read a node's data only when the list of its parent changes.
        """
        with self._guard:
            kept = self._kept.get(path)
        if kept is not None:
            self._note(kept)

    def drop(self, path: str) -> None:
        """Remove a node and keep it no longer; do nothing when it is not kept."""
        with self._guard:
            if self._kept.pop(path, None) is not None:
                self._dropped.add(path)
        self._wake.set()

    def held(self, path: str) -> bool:
        """Return whether a kept node is in place, as far as is known: it was written in the current session."""
        with self._guard:
            kept = self._kept.get(path)
        return kept is not None and kept.session is not None and kept.session == self.session

    def watch(self, path: str, changed: Callable[[], None]) -> Callable[[], None]:
        """Have ``changed`` called soon, after every change of a node or its children, and after every reconnection.

        That the node comes or goes is a change, too. The keeper makes the calls, perhaps one for several changes; ``changed``
        may make requests, and has to be quick. Returns a function that ends the watch.
        """
        watched = _Watched(path, changed)
        watched.seen = partial(self._note, watched)
        with self._guard:
            self._watched[watched] = None
        self._wake.set()
        return partial(self._unwatch, watched)

    def _unwatch(self, watched: _Watched) -> None:
        with self._guard:
            self._watched.pop(watched, None)

    def _note(self, entry: _Kept | _Watched, _: object = None) -> None:
        """Have the keeper look at an entry; kazoo calls this, too, so it must not block."""
        entry.unsettled = True
        self._wake.set()

    def _keep(self) -> None:
        """Run the keeper until ``stop``."""
        complaint = ""
        while not self._ended.is_set():
            self._wake.clear()
            pause = UNSETTLED_S
            try:
                pause = self._settle() if self.connected else self._reconnected()
            except RegistryUnavailable as error:
                level = logging.WARNING if self.connected and str(error) != complaint else logging.DEBUG
                logger.log(level, "zookeeper request failed reason=%s", error)
                complaint = str(error)
            except Exception:
                logger.exception("zookeeper keeper failed hosts=%s", self.hosts)
            self._wake.wait(pause)

    def _settle(self) -> float:
        """Do what is due now; return the seconds until the next call."""
        session = self.session
        if session is None:
            return 0.0  # the connection has just been lost
        if not self._was_connected:
            self._was_connected = True
            logger.info("zookeeper connected hosts=%s session=%#x", self.hosts, session)
            self.connected_at = self._clock.monotonic()
            self._unsettle()
        with self._guard:
            dropped, kept, watched = list(self._dropped), list(self._kept.values()), list(self._watched)
        for path in dropped:
            self._remove(path, session)
        due = [one for one in kept if one.unsettled or one.session != session]
        for late in (False, True):  # nodes that others wait for come first
            ready = [one for one in due if (one.after is not None) == late and (one.after is None or self.held(one.after))]
            for start in range(0, len(ready), AT_ONCE):
                self._place(ready[start : start + AT_ONCE], session)
        for one in watched:
            if one.unsettled:
                self._look(one)
        if any(one.unsettled for one in kept) or any(one.unsettled for one in watched):
            return UNSETTLED_S
        self._ask(self._begin_look("/"))  # the answer shows that kazoo still works
        return self.session_s

    def _unsettle(self) -> None:
        """Have everything looked at again after a reconnection: watches are gone, and anything may have changed."""
        with self._guard:
            for kept in self._kept.values():
                kept.unsettled = True
            for watched in self._watched:
                watched.unsettled = True

    def _remove(self, path: str, session: int) -> None:
        stat = self._ask(self._begin_look(path))
        if stat is None or stat.owner_session_id != session or self.commit([DeleteNode(path, stat.version)]):
            with self._guard:
                self._dropped.discard(path)

    def _place(self, nodes: Sequence[_Kept], session: int) -> None:
        """Put nodes in place: request them all at once, then look at what is there, whoever made it."""
        try:
            begun = []
            for kept in nodes:
                kept.unsettled = False
                data = kept.data()
                begun.append((kept, data, self._begin_create(kept.path, data)))
            made = [(kept, data, self._created(answer)) for kept, data, answer in begun]
            looks = [(kept, data, new, self._begin_look(kept.path, kept.seen)) for kept, data, new in made]
            for kept, data, new, answer in looks:
                self._judge(kept, data, self._ask(answer), session, new=new)
        except Exception:
            for kept in nodes:
                kept.unsettled = True
            raise

    def _judge(self, kept: _Kept, data: bytes, stat: Any, session: int, *, new: bool) -> None:
        """Note that a node is in place as it should be, or replace it."""
        if stat is None:
            kept.session, kept.unsettled = None, True
        elif stat.owner_session_id == session and (new or (kept.session == session and kept.written == data)):
            self._stands(kept, data, session)
        else:
            self._replace(kept, data, session, mine=stat.owner_session_id == session)

    def _replace(self, kept: _Kept, data: bytes, session: int, *, mine: bool) -> None:
        """Replace a node that is there already: one with old data, of a former session of ours, or of another process."""
        found = self.get(kept.path)
        if found is not None and not mine and not kept.same(found.data, data):
            kept.session = None  # the watch, or the next round, shows when it has gone
            complaint = f"another session has it: {found.data[:200].decode(errors='replace')!r}"
            if complaint != kept.complaint:
                hint = "a former run of this broker, whose session ends by itself, or two with one number or name"
                logger.error("zookeeper node taken path=%s reason=%s hint=%s", kept.path, complaint, hint)
            kept.complaint = complaint
            return
        if found is not None and self.commit(
            [DeleteNode(kept.path, found.version), CreateNode(kept.path, data, ephemeral=True)]
        ):
            self._stands(kept, data, session)
        kept.unsettled = True  # our own transaction has used up the watch, or another client was faster: look once more

    def _stands(self, kept: _Kept, data: bytes, session: int) -> None:
        if kept.session != session:
            logger.debug("zookeeper node made path=%s", kept.path)
        kept.written, kept.session, kept.complaint = data, session, ""

    def _look(self, watched: _Watched) -> None:
        """Watch for the next change first, so that none is missed, then report those until now."""
        watched.unsettled = False
        try:
            there = self._ask(self._begin_look(watched.path, watched.seen)) is not None
            if there and not self._watch_children(watched.path, watched.seen):
                watched.unsettled = True  # the node was removed between the two requests
                return
            watched.changed()
        except RegistryUnavailable:
            watched.unsettled = True
            raise
        except MetaqError as error:
            watched.unsettled = True
            logger.warning("zookeeper change not taken path=%s reason=%s", watched.path, error)
