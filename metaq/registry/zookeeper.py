"""What has to stand in ZooKeeper for as long as this process lives, and what is to be told of changes there.

All of it is done by the keeper, a greenlet or thread of its own, never in a callback of kazoo:

- ephemeral nodes that were lost with their session, or removed by somebody, are made again;
- what is watched is looked at again after every change and every reconnection.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import eq
from typing import Any, Final

from metaq.errors import MetaqError, RegistryUnavailable
from metaq.registry.session import Create, Delete, Session

logger = logging.getLogger(__name__)

UNSETTLED_S: Final = 0.25
"""Pause before what did not work is tried again."""
AT_ONCE: Final = 200
"""Requests that are on their way together."""


@dataclass(slots=True, eq=False)
class _Kept:
    """An ephemeral node that has to stand there."""

    path: str
    data: Callable[[], bytes]
    after: str | None
    same: Callable[[bytes, bytes], bool]
    seen: Callable[[object], None] = field(init=False)
    unsettled: bool = True
    written: bytes = b""
    session: int | None = None
    """In which it was written."""
    complaint: str = ""
    """What was said last of why it does not stand there."""


@dataclass(slots=True, eq=False)
class _Watched:
    """A path that somebody wants to hear of."""

    path: str
    changed: Callable[[], None]
    seen: Callable[[object], None] = field(init=False)
    unsettled: bool = True


class ZooKeeper(Session):
    """A session with a keeper."""

    def __init__(self, *arguments: Any) -> None:
        """See ``Session``."""
        super().__init__(*arguments)
        self._guard = self._tasks.lock_object()  # guards the tables that follow; nothing blocks under it
        self._kept: dict[str, _Kept] = {}
        self._watched: dict[_Watched, None] = {}  # in their order
        self._dropped: set[str] = set()
        self.connected_at = 0.0
        """The reading of the monotonic clock when the connection was made, the last time."""

    def start(self) -> None:
        """Connect, for as long as it takes, and keep what is to be kept; returns at once."""
        self._tasks.spawn(self._keep)

    def keep(
        self,
        path: str,
        data: Callable[[], bytes],
        *,
        after: str | None = None,
        same: Callable[[bytes, bytes], bool] = eq,
    ) -> None:
        """Have an ephemeral node stand at ``path`` from now on, with its parents, and again whenever it is lost.

        Args:
            path: where.
            data: what it holds; asked by the keeper, whenever the node is made, and after ``touch``.
            after: another kept node, before which this one is not made: whoever holds that one may have this one.
            same: whether what another session left there is our own (found, ours): then it is replaced at once. Anybody
                else's is waited for, and complained of.
        """
        kept = _Kept(path, data, after, same)
        kept.seen = partial(self._note, kept)
        with self._guard:
            self._kept[path] = kept
            self._dropped.discard(path)
        self._wake.set()

    def touch(self, path: str) -> None:
        """The data of a kept node has changed: it is deleted and made anew, in one transaction.

        MetaQ's clients read a node's data only when the list of its parent changes.
        """
        with self._guard:
            kept = self._kept.get(path)
        if kept is not None:
            self._note(kept)

    def drop(self, path: str) -> None:
        """Remove a kept node, and keep it no longer; nothing when it is not kept."""
        with self._guard:
            if self._kept.pop(path, None) is not None:
                self._dropped.add(path)
        self._wake.set()

    def held(self, path: str) -> bool:
        """Whether a kept node stands there, by all that is known."""
        with self._guard:
            kept = self._kept.get(path)
        return kept is not None and kept.session is not None and kept.session == self.session

    def watch(self, path: str, changed: Callable[[], None]) -> Callable[[], None]:
        """Have ``changed`` called soon, and after every change of the node at ``path``, of its existence or its children, and
        after every reconnection, until the function that is returned is called.

        The keeper calls it, once for several changes; it may make requests, and has to be quick.
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
        """Called by kazoo too, where nothing may block: have the keeper look."""
        entry.unsettled = True
        self._wake.set()

    def _keep(self) -> None:
        """The keeper."""
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
        """Do whatever is to be done now; how long to wait for the next time."""
        session = self.session
        if session is None:
            return 0.0  # the connection has just gone
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
        for late in (False, True):  # what others stand after comes first
            ready = [one for one in due if (one.after is not None) == late and (one.after is None or self.held(one.after))]
            for start in range(0, len(ready), AT_ONCE):
                self._place(ready[start : start + AT_ONCE], session)
        for one in watched:
            if one.unsettled:
                self._look(one)
        if any(one.unsettled for one in kept) or any(one.unsettled for one in watched):
            return UNSETTLED_S
        self._ask(self._begin_look("/"))  # that it is answered shows that kazoo still works
        return self.session_s

    def _unsettle(self) -> None:
        """After a reconnection: watches are gone, and nobody knows what has happened."""
        with self._guard:
            for kept in self._kept.values():
                kept.unsettled = True
            for watched in self._watched:
                watched.unsettled = True

    def _remove(self, path: str, session: int) -> None:
        stat = self._ask(self._begin_look(path))
        if stat is None or stat.owner_session_id != session or self.commit([Delete(path, stat.version)]):
            with self._guard:
                self._dropped.discard(path)

    def _place(self, nodes: Sequence[_Kept], session: int) -> None:
        """Have these nodes stand there: all are tried at once, and looked at, whoever made them."""
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
        """What stands there is as it should be, or is to be replaced."""
        if stat is None:
            kept.session, kept.unsettled = None, True
        elif stat.owner_session_id == session and (new or (kept.session == session and kept.written == data)):
            self._stands(kept, data, session)
        else:
            self._replace(kept, data, session, mine=stat.owner_session_id == session)

    def _replace(self, kept: _Kept, data: bytes, session: int, *, mine: bool) -> None:
        """A node is there already: with former data, of a former session of ours, or somebody else's."""
        found = self.get(kept.path)
        if found is not None and not mine and not kept.same(found.data, data):
            kept.session = None  # the watch, or the next round, tells when it has gone
            complaint = f"another session has it: {found.data[:200].decode(errors='replace')!r}"
            if complaint != kept.complaint:
                hint = "a former run of this broker, whose session ends by itself, or two with one number or name"
                logger.error("zookeeper node taken path=%s reason=%s hint=%s", kept.path, complaint, hint)
            kept.complaint = complaint
            return
        if found is not None and self.commit([Delete(kept.path, found.version), Create(kept.path, data, ephemeral=True)]):
            self._stands(kept, data, session)
        kept.unsettled = True  # our own transaction has used up the watch, or somebody was faster: look once more

    def _stands(self, kept: _Kept, data: bytes, session: int) -> None:
        if kept.session != session:
            logger.debug("zookeeper node made path=%s", kept.path)
        kept.written, kept.session, kept.complaint = data, session, ""

    def _look(self, watched: _Watched) -> None:
        """Watch for the next change first, so that none is missed, then tell of those until now."""
        watched.unsettled = False
        try:
            there = self._ask(self._begin_look(watched.path, watched.seen)) is not None
            if there and not self._watch_children(watched.path, watched.seen):
                watched.unsettled = True  # it went between the two
                return
            watched.changed()
        except RegistryUnavailable:
            watched.unsettled = True
            raise
        except MetaqError as error:
            watched.unsettled = True
            logger.warning("zookeeper change not taken path=%s reason=%s", watched.path, error)
