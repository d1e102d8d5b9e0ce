"""The history of all groups' progress, recorded every ``offset_export_interval_ms`` in ``METAQ_SYS_OFFSET_HISTORY``.

The topic is internal. A record is JSON lines (``metaq.protocol.remoting.offsetrows``) as a compressed body: some 50 bytes a
row, a seventh of its size. A look at many groups takes several records; all their rows carry its time. The history ages out
with all other messages; to keep weeks of it, copy it (``metaq offsets export``).
"""

import logging
import zlib
from collections.abc import Callable
from functools import partial
from typing import Final

from metaq.engine.context import Context
from metaq.engine.offsets.offsetexport import OffsetExporter
from metaq.engine.turn import Turns
from metaq.engine.writing import internal, note, stage
from metaq.errors import MetaqError
from metaq.message import HISTORY_TOPIC
from metaq.protocol.sysflag import COMPRESSED
from metaq.store.files.filecache import Run

logger = logging.getLogger(__name__)

LINES_BYTES: Final = 256 * 1024
"""The most bytes of rows in one record, before compression."""
FAST: Final = 1
"""The zlib level: the best one takes ten times as long for two thirds of the size."""


class OffsetHistory:
    """The recorder of one broker's groups. Only a master records."""

    def __init__(self, context: Context, export: OffsetExporter, turns: Turns, ending: Callable[[], bool], run: Run) -> None:
        """Create it; ``ending`` says whether the broker stops."""
        self._context = context
        self._store = context.store
        self._export = export
        self._turns = turns
        self._ending = ending
        self._run = run
        self._most_bytes = min(LINES_BYTES, context.settings.segment_bytes // 4)
        self._incomplete = False

    def record(self) -> None:
        """Record one look at all groups; called as a duty."""
        lines: list[bytes] = []
        problem, size = None, 0
        for part in self._export.look(self._store.clock.now_ms()):
            problem = part.problem or problem
            for line in part.rows:
                size += len(line) + 1
                if size > self._most_bytes and lines:
                    self._put(lines)
                    lines, size = [], len(line) + 1
                lines.append(line)
            if self._stopped:
                return
        self._put(lines)
        if problem is not None and not self._incomplete:
            logger.warning("offset history incomplete until further notice reason=%s", problem)
        elif problem is None and self._incomplete:
            logger.info("offset history complete again")
        self._incomplete = problem is not None

    @property
    def _stopped(self) -> bool:
        return self._ending() or not self._store.writable

    def _put(self, lines: list[bytes]) -> None:
        if not lines or self._stopped:
            return
        body = self._run(partial(zlib.compress, b"\n".join(lines), FAST))
        if not self._stopped:  # other greenlets ran meanwhile
            stage(self._context, internal(self._context, HISTORY_TOPIC, body, sys_flag=COMPRESSED))
            note(self._turns, _recorded)


def _recorded(error: MetaqError | None) -> None:
    if error is not None:
        logger.error("offset history not recorded reason=%s", error)
