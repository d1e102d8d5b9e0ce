"""The broker as a process: ready line, signals, exit codes."""

import gc
import logging
import os
import signal
import sys

import gevent
from gevent.event import Event
from gevent.hub import Hub

from metaq import logs
from metaq.config import Settings
from metaq.errors import MetaqError
from metaq.server.broker import Broker
from metaq.store.disk import Disk

logger = logging.getLogger(__name__)

GC_ALLOCATIONS = 20_000
"""A turn keeps some thousands of small objects until it ends; they are no reason to look for cycles."""

STARTED_NOT = 1
"""Exit code: the broker did not start; the reason is on standard error."""


def run(settings: Settings, disk: Disk | None = None) -> int:
    """Serve until SIGTERM or SIGINT, then drain; return the process's exit code.

    Once it serves it prints one line to standard output: ``metaq ready listen=HOST:PORT data=DIR pid=N``.
    """
    logs.configure(settings.log_level)
    Hub.SYSTEM_ERROR = (*Hub.SYSTEM_ERROR, AssertionError)  # a failed assertion ends the process
    stopping = Event()
    watchers = [gevent.signal_handler(number, stopping.set) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        broker = Broker(settings, disk=disk)
        broker.start()
    except MetaqError as error:
        print(f"metaq: {error}", file=sys.stderr)
        return STARTED_NOT
    recovery = broker.recovery
    logger.info(
        "recovered unclean=%s walked_from=%d end=%d records=%d gaps=%d",
        *(recovery.unclean, recovery.walked_from, recovery.end, recovery.records, len(recovery.gaps)),
    )
    addresses = broker.addresses
    # What lives now lives until the end: a full collection would look at 100,000 objects and stop the loop for 10 ms.
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 50)
    named = {"listen": addresses.text, "remoting": addresses.remoting, "registry": addresses.registry}
    where = " ".join(f"{name}={address[0]}:{address[1]}" for name, address in named.items() if address is not None)
    print(f"metaq ready {where} data={settings.data} pid={os.getpid()}", flush=True)
    stopping.wait()
    logger.info("stopping")
    broker.stop()
    for watcher in watchers:
        watcher.cancel()
    logger.info("stopped")
    return 0
