"""Checkpointing: how much of the log the next start need not walk, and the work that makes it so.

Sweeps write the pending units of the queues, several times a second, and then the live mark, which holds for as long as the
page cache does. Checkpoints make log, queues and key index durable, and hold after a power cut, too. Neither may meet a staged
message, whose append may still fail.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from metaq.errors import DiskFailed, DiskFull, StoreError, TooManyFiles
from metaq.store.checkpoint import Checkpoint, Live, PartitionProgress, write_checkpoint
from metaq.store.files.disk import Disk, File
from metaq.store.files.filecache import Rest, Run
from metaq.store.gate import Gate
from metaq.store.index.indexing import Indexing
from metaq.store.index.keyindex import NO_INDEX, IndexMark
from metaq.store.queues.consumequeue import ConsumeQueue, sync_together

Slices = Callable[[Iterable[ConsumeQueue], Rest], Iterator[ConsumeQueue]]
"""Yields the queues one by one, and lets others go on (the ``Rest``) in between: nothing is staged afterwards."""


class Checkpointing:
    """The queues that have units to write, and the checkpoint, of one store."""

    def __init__(
        self, gate: Gate, indexing: Indexing, disk: Disk, directory: Path, slices: Slices, *, many_queues: int
    ) -> None:
        """Begin with nothing written; from ``many_queues`` changed ones on, they are synced with their file system."""
        self._gate = gate
        self._log = gate.log
        self._indexing = indexing
        self._disk = disk
        self._directory = directory
        self._slices = slices
        self._many_queues = many_queues
        # dicts serve as ordered sets, so that the same work always makes the same disk calls
        self._unwritten: dict[ConsumeQueue, None] = {}  # queues with pending units
        self._changed: dict[ConsumeQueue, None] = {}  # queues that differ from the last durable checkpoint
        self._partitions: dict[tuple[str, int], PartitionProgress] = {}  # as of the last durable checkpoint
        self._index_mark = NO_INDEX  # the key index in the last durable checkpoint
        self.index_covered = ""
        """The newest index file that the backup of the checkpoint names."""
        self._mark = -1  # of the last durable checkpoint
        self.covered = -1
        """The log offset up to which both the checkpoint and its backup cover the log."""
        self._live_mark = -1

    def begin(
        self,
        queues: Iterable[ConsumeQueue],
        partitions: dict[tuple[str, int], PartitionProgress],
        index_mark: IndexMark,
        covered: int,
    ) -> None:
        """Take over what recovery found: the queues, and what the durable checkpoint on disk says.

        It and its backup cover the log up to ``covered``.
        """
        self._partitions, self._index_mark, self.covered = partitions, index_mark, covered
        for queue in queues:
            if queue.pending_bytes:
                self._unwritten[queue] = None
            if partitions.get((queue.topic, queue.partition)) != PartitionProgress(queue.next, queue.text_end):
                self._changed[queue] = None

    def appended(self, queue: ConsumeQueue) -> None:
        """Take note that a queue has new units."""
        self._unwritten[queue] = None
        self._changed[queue] = None

    def write_units(self, queue: ConsumeQueue) -> StoreError | None:
        """Write a queue's pending units; return the error when that fails. Without room for them, puts are refused."""
        try:
            self._log.owed.check()
            queue.write()
        except DiskFull as error:
            self._gate.behind = error
            return error
        except DiskFailed as error:
            self._gate.fail(error)
            return error
        self._unwritten.pop(queue, None)
        return None

    def sweep(self, live: Live, rest: Rest) -> None:
        """Write all units that are pending now, and ``live``, which counts them. One call at a time.

        When some of them cannot be written, the live mark stays, and the next sweep tries again. Raises ``TooManyFiles`` then
        if that was the reason; of other failures the gate tells.
        """
        gate, behind, failed = self._gate, self._gate.behind, None
        for queue in self._slices(list(self._unwritten), rest):
            failed = self.write_units(queue) or failed
        if isinstance(failed, TooManyFiles):
            raise failed
        if failed is not None:
            return
        if gate.behind is behind:
            gate.behind = None
        if gate.failure is None and live.mark != self._live_mark:
            gate.live.write(live)
            self._live_mark = live.mark

    def checkpoint(self, durable_end: int, lock: File | None, run: Run, rest: Rest, run_sync: Run) -> None:
        """Make everything up to now durable and write a checkpoint (``MessageStore.checkpoint``).

        The log is durable up to ``durable_end`` already. ``lock`` is a file by which its file system can be synced.
        """
        log, gate = self._log, self._gate
        log.owed.check()
        mark = log.end
        unchanged = mark == self.covered and not self._changed and self._indexing.mark == self._index_mark
        if gate.failure is not None or unchanged:
            return
        changed, self._changed = self._changed, {}
        ends = [(queue.next, queue.text_end) for queue in changed]
        index = self._indexing.capture()
        progress = {}
        try:
            for queue, end in zip(self._slices(list(changed), rest), ends, strict=True):
                queue.write()
                progress[queue.topic, queue.partition] = PartitionProgress(*end)
            log.sync(min(durable_end, mark), run_sync)
            many = len(changed) >= self._many_queues
            if not (many and lock is not None and sync_together(self._slices(changed, rest), lock, run)):
                above: set[Path] = set()
                for queue in changed:
                    queue.sync(run, above)
            flushed = index is not None and self._indexing.flush(index, run)
            index_mark = index.mark if index is not None and flushed else self._index_mark
            gate.check_healthy()  # the kernel may have reported a failed write only to another sync that ran meanwhile
            partitions = {**self._partitions, **progress}
            run(lambda: write_checkpoint(self._disk, self._directory, Checkpoint(mark, partitions, index_mark)))
        except BaseException as error:  # also when the caller gives up while it waits
            self._changed |= changed
            if isinstance(error, DiskFailed):
                gate.fail(error)
            raise
        self._partitions = partitions
        self.index_covered, self._index_mark = self._index_mark.file, index_mark
        self.covered, self._mark = self._mark, mark
