"""The slave's side of replication (``metaq.replication.frames``): one greenlet follows a master, others write to the disk."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import gevent
from gevent import socket
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from metaq.address import Address
from metaq.errors import DiskFull, MetaqError, NotWritable, ProtocolError, StoreError, TooManyFiles
from metaq.replication import documents
from metaq.replication.feeder import ReplicaIdentity, checksum_text
from metaq.replication.frames import HELLO_HEAD, REPORT, Control, Data, Hello, ReplicationFrameReader
from metaq.replication.peers import STRANGER, Claim, Peers
from metaq.replication.sameness import ranges
from metaq.store.copies.applying import Copier
from metaq.store.copies.discarding import begin_at_next_opening, cut_at_next_opening
from metaq.store.copies.epochs import Epochs, last_record
from metaq.store.files.filecache import Run, read_through
from metaq.store.messagestore import MessageStore
from metaq.store.queues.consumequeue import ConsumeQueue

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 3.0
SILENCE_S: Final = 5.0
"""A master that sends nothing for this time, not even a heartbeat, is taken for gone."""
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 1.0
RECEIVE_BYTES: Final = 1024 * 1024
WORK_S: Final = 0.01
"""How long to process what comes before other greenlets run."""
REPORT_S: Final = 0.25
"""Once the last report is older than this, a control frame, such as a heartbeat, is answered even if nothing is new."""
PROGRESS_S: Final = 5.0
"""The pause between two log lines about a long copy."""


class Replaced(Exception):
    """Raised when the log has to be cut or replaced, for which the store must be opened anew at once."""


class SlaveRefused(ProtocolError):
    """Raised when the master refuses this slave."""


class NoMaster(ProtocolError):
    """Raised when the other replica takes no slaves now. One that was just elected has to open its store first."""


@dataclass(slots=True)
class Seen:
    """The state of the master as it was last reported."""

    epoch: int = 0
    log_end: int = 0
    readable_end: int = 0
    begin: int = 0
    in_sync: frozenset[int] = frozenset()
    address: str = ""
    """The address of the master that is followed; empty while none is."""
    problem: str | None = None
    """Why none is followed; ``None`` while one is."""
    is_unfit: bool = False
    """True when the problem is this replica's own, or its master's refusal: others may well have a master."""


class Follower:
    """A copier of a master's log into a store to which nothing else writes."""

    def __init__(
        self,
        store: MessageStore,
        epochs: Epochs,
        identity: ReplicaIdentity,
        text_address: str,
        *,
        find_master: Callable[[], Address | None],
        folder: Path,
        run: Run,
        run_sync: Run,
        took: Callable[[Collection[str]], None],
        published: Callable[[Sequence[ConsumeQueue]], None],
        replaced: Callable[[], None],
        peers: Peers = STRANGER,
        proved_end: int = 0,
    ) -> None:
        """Create it.

        ``run_sync`` makes syncs of the log, apart from other disk calls. ``took`` receives the names of tables that the master
        has sent and that are written; ``published`` receives the queues in which readers can see more. ``replaced`` is called
        when the store has to be closed and opened anew. ``proved_end`` is the end of a record before which the log is known to
        be right.
        """
        self.seen = Seen()
        self._store = store
        self._epochs = epochs
        self._identity = identity
        self._text_address = text_address
        self._find_master = find_master
        self._folder = folder
        self._run = run
        self._run_sync = run_sync
        self._took = took
        self._published = published
        self._replaced = replaced
        self._peers = peers
        self._monotonic = store.clock.monotonic
        self._on_disk = store.settings.durability.on_disk
        self._proved_end = proved_end
        self._agreed = False
        """True when all that the log holds was proved, or was copied, in an earlier connection."""
        self._connection: socket.socket | None = None
        self._sync_due = Event()
        self._tables: dict[str, str] = {}
        """Tables that the master has sent, and that are not written yet."""
        self._tables_due = Event()
        self._keeping = BoundedSemaphore(1)
        """Held while something is written beside the log, which ``stop`` waits for."""
        self._stopping = False
        self._keeper: Any = None
        self._go_now = Event()
        self._followed: Address | None = None
        self._tried = "none"
        self._reported = -1
        self._report_due = 0.0
        self._progress_due = 0.0
        self._greenlets: list[Any] = []

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._greenlets = [gevent.spawn(self._follow_forever)]
        self._keeper = gevent.spawn(self._keep_forever)
        if self._on_disk:
            self._greenlets.append(gevent.spawn(self._sync_forever))

    def stop(self) -> None:
        """Stop following. Complete records that came are in the log, and the tables are written.

        When the log is to be replaced, that is written down: the next opening does it, whoever opens the store.
        """
        self._stopping = True
        with self._keeping:  # a call of the pool goes on when its greenlet is killed, and could end after the next opening
            gevent.killall(self._greenlets)
        self._close()
        self._keep_tables()  # waits until those that are being written are done
        gevent.kill(self._keeper)

    def go_to(self, master: Address) -> None:
        """Follow a new master at once: end the connection to the old one, and any pause before the next try."""
        if master != self._followed:
            self._go_now.set()
            self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _follow_forever(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            began = self._monotonic()
            try:
                self._follow()
            except Replaced:
                self._close()
                if not self._stopping:
                    self._replaced()
                return
            except (OSError, MetaqError) as error:
                if not self._go_now.is_set():
                    self._report_problem(error)
            finally:
                self._close()
                self._take_back()
            pause_s = FIRST_PAUSE_S if self._monotonic() - began > LONGEST_PAUSE_S else min(2 * pause_s, LONGEST_PAUSE_S)
            if self._go_now.wait(pause_s):
                self._go_now.clear()
                pause_s = FIRST_PAUSE_S

    def _report_problem(self, error: Exception) -> None:
        """Log a problem once, not at every try."""
        problem, is_unfit = str(error), isinstance(error, (SlaveRefused, StoreError, NotWritable))
        if problem != self.seen.problem:
            level = logging.INFO if isinstance(error, NoMaster) else logging.WARNING
            logger.log(logging.ERROR if is_unfit else level, "not following master=%s reason=%s", self._tried, problem)
        self.seen.problem, self.seen.is_unfit, self.seen.address = problem, is_unfit, ""

    def _take_back(self) -> None:
        """Append what was staged when the connection ended: these records are complete."""
        if not self._store.settled:
            try:
                self._publish(self._store.append())
            except StoreError as error:
                logger.error("append failed reason=%s", error)

    # -- following ----------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Follow the master until the connection ends; always raises the reason in the end."""
        address = self._followed = self._find_master()
        if address is None:
            raise ProtocolError("no master is known")
        self._tried = str(address)
        self._store.check_healthy()
        hello = self._hello().encode()  # it reads the log: before the connection, so that the master does not wait for it
        connection = self._connection = self._peers.connect(address, CONNECT_TIMEOUT_S)
        if self._go_now.is_set():  # there was no connection yet that ``go_to`` could end
            raise ProtocolError("another replica has become master meanwhile")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SILENCE_S)
        connection.sendall(hello)
        claim = Claim(self._peers.credentials(), hello[HELLO_HEAD:])
        self._reported = -1
        reader, copier, agreed = ReplicationFrameReader(), Copier(self._store), False
        rest_due = self._monotonic() + WORK_S
        while True:
            data = connection.recv(RECEIVE_BYTES)
            if not data:
                raise ProtocolError("the master closed the connection")
            self._store.check_healthy()  # after a failure it could not tell whether it still holds what it reports
            for item in reader.receive(data):
                if not agreed and isinstance(item, Control) and "challenge" in item.content:
                    connection.sendall(claim.answer(item.content["challenge"]))
                elif not agreed and isinstance(item, Control) and "comparing" in item.content:
                    logger.debug("log is compared at=%d end=%d", item.content["comparing"], self._store.log.end)
                elif not agreed:
                    self._agree(item, claim)
                    agreed = self._agreed = True
                    self.seen.address, self.seen.problem, self.seen.is_unfit = self._tried, None, False
                    logger.info("following master=%s from=%d", self.seen.address, self._store.log.end)
                elif isinstance(item, Data):
                    self._take(copier, item)
                else:
                    self._settle()
                    self._hear(item)
            if agreed:
                self._append()
            if self._monotonic() >= rest_due:
                gevent.sleep(0.001)
                rest_due = self._monotonic() + WORK_S

    def _hello(self) -> Hello:
        store, own = self._store, self._identity
        self._epochs.refresh()
        if self._agreed:  # bytes that no sync has covered are proved once more: the disk may have lost them
            self._proved_end = max(self._proved_end, store.durable_end)
        last: list[Any] | None = None
        found = last_record(store)
        if found is not None and (stored := store.log.record_at(found[0])) is not None:
            last = [*found, checksum_text(stored.buffer)]
        return Hello(
            cluster=own.cluster,
            broker_name=own.broker_name,
            broker_number=own.broker_number,
            replica=own.replica,
            segment_bytes=store.settings.segment_bytes,
            begin=store.log.begin,
            end=store.log.end,
            epochs=[list(epoch) for epoch in self._epochs.table],
            last=last,
            text=self._text_address,
            proved=self._proved_end,
            ranges=ranges(store.log, self._proved_end, read_through(self._run)),
        )

    def _agree(self, first: Data | Control, claim: Claim) -> None:
        """Act on the first frame of the master.

        Raises ``Replaced`` when the store has to be opened anew for it, ``SlaveRefused`` or ``NoMaster`` when this slave cannot
        follow, ``ProtocolError`` for a frame that makes no sense.
        """
        if isinstance(first, Data):
            raise ProtocolError("the master does not say where it begins")
        content, store = first.content, self._store
        if "refused" in content:
            raise _refusal(content)
        if "no_master" in content:
            raise NoMaster(f"not a master: {content['no_master']}")
        claim.check(content.get("proof", ""))
        if "copy" in content:
            begin, partitions = content["copy"]["begin"], content["copy"]["partitions"]
            logger.warning("log is copied anew begin=%d own_begin=%d own_end=%d", begin, store.log.begin, store.log.end)
            with self._keeping:
                self._suspect("its log is copied anew")
                begin_at_next_opening(store, begin, partitions, self._run)
                self._give_up_derived()
        end = content.get("follow")
        if end is None or end > store.log.end:
            raise ProtocolError(f"the master does not say where to continue from {store.log.end}")
        if end < store.log.end:
            logger.warning("log diverged, cut at=%d own_end=%d", end, store.log.end)
            with self._keeping:
                if "differs" in content:
                    self._suspect(f"its log was not its master's from log offset {end} on, and was cut there")
                cut_at_next_opening(store, end, self._proved_end if "differs" in content else None, self._run)
                self._give_up_derived()
        if store.log.begin == end:
            with self._keeping:
                self._suspect("its log was empty")

    def _suspect(self, reason: str) -> None:
        """Mark the log as suspect until the master counts this replica as in sync: it may lack messages that it had."""
        if self._store.suspicion.reason is None:
            self._run(lambda: self._store.suspicion.rise(reason))

    def _give_up_derived(self) -> NoReturn:
        self._tables = {}
        documents.forget_derived(self._folder, self._store.disk)
        raise Replaced

    def _take(self, copier: Copier, item: Data) -> None:
        if (shortage := self._store.shortage) is not None:
            raise DiskFull(shortage)
        copier.take(item.log_offset, item.data)

    def _hear(self, control: Control) -> None:
        content, seen = control.content, self.seen
        if "refused" in content:
            self._show()  # readers may see what came before
            raise _refusal(content)
        try:
            seen.epoch, seen.readable_end, seen.begin = content["epoch"], content["readable_end"], content["begin"]
            seen.in_sync, seen.log_end = frozenset(content["in_sync"]), control.log_end
        except KeyError as error:
            raise ProtocolError("a control frame lacks a field") from error
        if seen.epoch != self._epochs.current.number:
            self._epochs.refresh()
        suspicion = self._store.suspicion
        if suspicion.reason is not None and self._identity.replica in seen.in_sync:
            logger.info("suspect no more reason=%s end=%d", suspicion.reason, self._store.log.end)
            with self._keeping:
                self._run(suspicion.clear)
        if "documents" in content:
            documents.check(self._folder, content["documents"])
            self._tables |= content["documents"]
            self._tables_due.set()
        if self._monotonic() >= self._report_due:
            self._reported = -1

    def _settle(self) -> None:
        """Append what has come to the log."""
        if not self._store.settled:
            self._publish(self._store.append())
            self._show_progress()

    def _append(self) -> None:
        """Append what has come to the log, publish what readers may see, and report to the master."""
        store = self._store
        self._settle()
        self._show()
        if self._on_disk and store.durable_end < store.log.end:
            self._sync_due.set()
        self._report()

    def _show(self) -> None:
        """Publish what readers may see."""
        store = self._store
        self._publish(store.publish(min(self.seen.readable_end, store.durable_end if self._on_disk else store.log.end)))

    def _publish(self, queues: Sequence[ConsumeQueue]) -> None:
        if queues:
            self._published(queues)

    def _report(self) -> None:
        end = self._store.durable_end if self._on_disk else self._store.log.end
        if end != self._reported and self._connection is not None:
            self._connection.sendall(REPORT.pack(end))
            self._reported = end
            self._report_due = self._monotonic() + REPORT_S

    def _show_progress(self) -> None:
        behind = self.seen.log_end - self._store.log.end
        if behind > RECEIVE_BYTES and self._monotonic() >= self._progress_due:
            self._progress_due = self._monotonic() + PROGRESS_S
            logger.info("copying end=%d master_end=%d behind_bytes=%d", self._store.log.end, self.seen.log_end, behind)

    def _keep_forever(self) -> None:
        """Write the tables that come. The log does not wait for it: a write may take a tenth of a second on a busy disk."""
        while True:
            self._tables_due.wait()
            self._tables_due.clear()
            self._keep_tables()

    def _keep_tables(self) -> None:
        with self._keeping:
            tables, self._tables = self._tables, {}
            if not tables:
                return
            try:
                durable_end = self._store.durable_end
                self._run(lambda: documents.keep(self._folder, self._store.disk, tables, durable_end))
            except StoreError as error:
                logger.error("tables of the master not kept reason=%s", error)
                self._close()  # a master sends all tables to a slave that connects anew
            else:
                self._took(tables)

    def _sync_forever(self) -> None:
        """Sync the log, which slaves at DISK do before they report; one sync covers all that came meanwhile."""
        while True:
            self._sync_due.wait()
            self._sync_due.clear()
            try:
                self._store.sync(self._run_sync)
                self._append()
            except TooManyFiles as error:
                logger.error("sync of this slave not begun, tried again reason=%s", error)
                self._close()  # an append that failed for this reason has dropped what had come
                gevent.sleep(LONGEST_PAUSE_S)
                self._sync_due.set()
            except StoreError as error:
                logger.critical("sync failed, this slave follows no more until it is restarted reason=%s", error)
                self._close()
                return
            except MetaqError as error:
                self._report_problem(error)
                self._close()
            except OSError as error:
                logger.debug("report lost reason=%s", error)


def _refusal(content: Mapping[str, Any]) -> SlaveRefused:
    return SlaveRefused(f"the master refuses this slave: {content['refused']}")
