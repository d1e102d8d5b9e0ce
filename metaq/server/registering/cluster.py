"""The other processes of the cluster, masters and slaves, as this broker sees them: each is asked what it is doing.

The registries say which there are. A killed process is no longer among them, so those that were seen are remembered
(``metaq.registry.processes``), and go on to be asked. All are asked at once, with ``ASK_S`` for each, and one look serves all
who look within ``KEEP_S``: however many pages are open, a process is asked once.

This broker asks as it follows its master: with the user ``cluster_user``, and in TLS if that is configured.
"""

import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import gevent
import orjson

from metaq.address import parse_address
from metaq.errors import BadRequest, MetaqError, Refused, RequestTimeout
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.routes import decode_kv_table
from metaq.registry.processes import MOST_PROCESSES, Process, SeenProcess, SeenProcesses
from metaq.server.registering.outbound import Outbound
from metaq.server.registering.registration import Registration

ASK_S: Final = 2.0
KEEP_S: Final = 2.0


class ProcessReport(NamedTuple):
    """The answers of one process."""

    info: Mapping[str, str]
    """Statistics by name (28)."""
    replica: Mapping[str, Any] | None
    """Its state as a replica (30020); ``None`` when it takes no slaves."""


class ProcessState(NamedTuple):
    """The state of a process."""

    process: Process
    registered: bool
    """False for one that a registry knew and knows no longer."""
    report: ProcessReport | None
    """What it answered; ``None`` when it cannot be reached, or refuses."""
    problem: str | None
    reached_ms: int | None
    """When it answered last (Unix time)."""
    replica: int | None
    """Its number, where it ever said one."""


class ClusterLook(NamedTuple):
    """One look at all other processes."""

    states: tuple[ProcessState, ...]
    problem: str | None
    """Why no registry could be asked: then these are the processes that were seen before."""
    left_out: int
    """SeenProcesses beyond ``MOST_PROCESSES``."""


class ClusterWatch:
    """Looks at the other processes."""

    def __init__(self, registration: Registration, seen: dict[str, SeenProcess]) -> None:
        """Prepare. ``seen`` are the processes that were seen, and takes others."""
        self._registration = registration
        self._processes = SeenProcesses(seen)
        self._looked: ClusterLook | None = None
        self._looked_s = 0.0
        self._looking: Any = None

    @property
    def own(self) -> Process:
        """This process, as it is registered."""
        key = self._registration.key
        return Process(key.cluster, key.name, key.number, key.address)

    def look(self) -> ClusterLook:
        """Return the state of all others. It waits for some ``ASK_S`` at most, for the registries and then for the others."""
        now_s = time.monotonic()
        if self._looked is not None and now_s - self._looked_s < KEEP_S:
            return self._looked
        if self._looking is None:
            self._looking = gevent.spawn(self._look)
        looking = self._looking
        try:
            looked: ClusterLook = looking.get()
        finally:
            if looking.dead and self._looking is looking:
                self._looking = None
        return looked

    def _look(self) -> ClusterLook:
        known, problem, left_out = self._listed()
        asked = {**self._processes.lost(known), **known}
        asked.pop(self.own.address, None)
        answers = [(process, gevent.spawn(self._ask, process)) for process in asked.values()]
        gevent.joinall([greenlet for _, greenlet in answers])
        for process, greenlet in answers:
            if isinstance(greenlet.value, ProcessReport):
                replica = greenlet.value.replica
                number = None if replica is None else replica["replica"]
                self._processes.reached(process.address, number, time.time_ns() // 1_000_000)
        gone = set() if problem else asked.keys() - known.keys()
        states = []
        for process, greenlet in answers:
            last = self._processes.last(process.address)
            if last is not None:
                states.append(_state(process, greenlet.value, last, registered=process.address not in gone))
        self._looked, self._looked_s = ClusterLook(tuple(states), problem, left_out), time.monotonic()
        return self._looked

    def _listed(self) -> tuple[dict[str, Process], str | None, int]:
        """Return the processes that a registry knows, why none could be asked, and how many are left out."""
        try:
            info = self._registration.cluster_info()
        except MetaqError as error:
            return {}, str(error), 0
        processes = [
            Process(broker.cluster, broker.name, number, address)
            for broker in info.brokers.values()
            for number, address in broker.addresses.items()
        ]
        known = {process.address: process for process in sorted(processes)[:MOST_PROCESSES]}
        self._processes.listed(known, time.monotonic())
        return known, None, max(0, len(processes) - MOST_PROCESSES)

    def _ask(self, process: Process) -> ProcessReport | str:
        """Return what a process says, or why it says nothing."""
        try:
            with gevent.Timeout(ASK_S, RequestTimeout(f"no answer within {ASK_S:g} s")):
                address = parse_address(process.address, setting="the registered address")
                link = Outbound(address, ASK_S, peers=self._registration.peers)
                try:
                    return _report(link)
                finally:
                    link.close()
        except MetaqError as error:
            return str(error)


def _report(link: Outbound) -> ProcessReport:
    """Ask one process. Raise ``ClientError``, or ``BadRequest`` when it is not metaq."""
    info = decode_kv_table(link.call(Request.GET_BROKER_RUNTIME_INFO, {}).body)
    try:
        answer = link.call(Request.REPLICA_STATUS, {})
    except Refused as error:
        if error.code != Response.REQUEST_CODE_NOT_SUPPORTED:
            raise
        return ProcessReport(info, None)
    return ProcessReport(info, read_replica_state(answer.body))


def read_replica_state(body: bytes) -> Mapping[str, Any]:
    """Return the state of a replica (30020). Raise ``BadRequest``."""
    try:
        state = orjson.loads(body)
        slaves = [{**slave, "replica": int(slave["replica"])} for slave in state["slaves"]]
        return {**state, "replica": int(state["replica"]), "slaves": slaves}
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise BadRequest(f"the body is not the state of a replica: {error!r}"[:200]) from error


def _state(
    process: Process, answer: ProcessReport | str | None, last: tuple[int, int | None], *, registered: bool
) -> ProcessState:
    report, problem = (answer, None) if isinstance(answer, ProcessReport) else (None, answer or "it could not be asked")
    return ProcessState(process, registered, report, problem, last[0] or None, last[1])
