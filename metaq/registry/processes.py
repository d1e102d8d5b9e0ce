"""SeenProcesses of a cluster that were seen, whatever registries know now: a killed one is no longer among theirs."""

from collections.abc import Mapping
from typing import Final, NamedTuple

FORGET_S: Final = 3600.0
MOST_PROCESSES: Final = 256
"""SeenProcesses that a cluster may have; twice as many are remembered."""


class Process(NamedTuple):
    """A process as registries know it."""

    cluster: str
    broker: str
    number: int
    """``MASTER``, or the number of a slave."""
    address: str


class SeenProcess(NamedTuple):
    """A process that was seen."""

    process: Process
    listed_s: float
    """When a registry knew it last, in monotonic seconds."""
    replica: int | None
    """Its number, where it said one."""
    reached_ms: int | None


class SeenProcesses:
    """The processes that were seen, by address."""

    def __init__(self, seen: dict[str, SeenProcess]) -> None:
        """Keep them in ``seen``, which may have some."""
        self._seen = seen

    def listed(self, processes: Mapping[str, Process], now_s: float) -> None:
        """Take note of the processes that a registry knows, and forget those that none has known for long."""
        for address, process in processes.items():
            before = self._seen.pop(address, None)
            self._seen[address] = SeenProcess(process, now_s, before and before.replica, before and before.reached_ms)
        old = [address for address, seen in self._seen.items() if now_s - seen.listed_s > FORGET_S]
        for address in (*old, *list(self._seen)[: max(0, len(self._seen) - 2 * MOST_PROCESSES)]):
            self._seen.pop(address, None)

    def lost(self, processes: Mapping[str, Process]) -> dict[str, Process]:
        """Return the processes that no registry knows any more."""
        return {address: seen.process for address, seen in self._seen.items() if address not in processes}

    def reached(self, address: str, replica: int | None, now_ms: int) -> None:
        """Take note of an answer. What was known of the same replica at another address is forgotten."""
        seen = self._seen.get(address)
        if seen is None:  # it is another one's other address, and that one has answered
            return
        if replica is not None:
            same = (seen.process.cluster, seen.process.broker, replica)
            for other, known in list(self._seen.items()):
                if other != address and (known.process.cluster, known.process.broker, known.replica) == same:
                    del self._seen[other]
        self._seen[address] = seen._replace(replica=replica, reached_ms=now_ms)

    def last(self, address: str) -> tuple[int, int | None] | None:
        """Return when a process answered last (Unix time; 0 when never) and its number; ``None`` when it was forgotten."""
        seen = self._seen.get(address)
        return None if seen is None else (seen.reached_ms or 0, seen.replica)
