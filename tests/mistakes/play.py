"""Playing the whole list against one broker."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tests.mistakes.table import Mistake, Player, Step, read
from tests.support.broker import BrokerProcess, RegistryProcess
from tests.support.ports import free_ports

ANYWHERE: Final = "--listen 127.0.0.1:0 --remoting-listen none --registry-listen 127.0.0.1:0 --http-listen none"
"""Flags of a broker that shall not fail because of the ports of this machine."""


def played(folder: Path, *, starting: bool | None = None) -> Iterator[tuple[Mistake, Mistake]]:
    """Yield each mistake of the list as it stands there, and as it was answered.

    With ``starting`` only those with commands that start something, or only the others.
    """
    work = folder / "work"
    for path in (work, folder / "broker"):
        path.mkdir()
    with ExitStack() as stack:
        broker = stack.enter_context(BrokerProcess(folder / "broker" / "data", "--max-body-bytes", "100000"))
        standalone = stack.enter_context(RegistryProcess(folder / "broker" / "registry"))
        stranger = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=speak_http, args=(stranger,), daemon=True).start()
        player = Player(
            {
                "broker": broker.address,
                "registry": broker.registry,
                "standalone": standalone.address,
                "http": broker.http,
                "stranger": f"127.0.0.1:{stranger.getsockname()[1]}",
                "closed": f"127.0.0.1:{free_ports(1)[0]}",
                "data": str(broker.data),
                "folder": str(work),
                "large": "x" * 100_001,
                "anywhere": ANYWHERE,
            }
        )
        for entry in read():
            if isinstance(entry, Step):
                player.take(entry)
            elif starting is None or starting is entry.starts:
                yield entry, player.play(entry)


def speak_http(server: socket.socket) -> None:
    """Answer whatever comes as a web server does that does not understand it."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
