"""RocketMQ's broker: its jars, which Maven fetches, in a Java machine of its own. Sends need no name server."""

import fcntl
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.figures import MeasurementError
from benchmarks.peers import Level, System
from benchmarks.programs import BUILD
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import encode_request

VERSION: Final = "4.9.7"
HERE: Final = Path(__file__).parent
JARS: Final = BUILD / f"rocketmq-{VERSION}"
FETCH_SECONDS: Final = 600
JAVA: Final = shutil.which("java")
HEAP: Final = ("-server", "-Xms4g", "-Xmx4g", "-Xmn2g", "-XX:+UseG1GC")
"""Half of what its own script gives it, on machines of 24 GB; the collector is the one of that script."""
OPENED: Final = (
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
)
"""Modules that it enters, which Java 17 closes."""
SETTINGS: Final = """\
brokerClusterName=bench
brokerName=bench
brokerIP1=127.0.0.1
listenPort={port}
storePathRootDir={folder}/store
storePathCommitLog={folder}/store/commitlog
flushDiskType=ASYNC_FLUSH
waitTimeMillsInSendQueue=2000
"""
"""Every other setting at its default. A topic is made by the first send.

A send that has waited for 200 ms is refused by default, which a pause of the collector can cause; errors are no figure.
"""


def rocketmq() -> System:
    """Return the broker at the level MEMORY: it answers when a message is in the page cache."""
    found = JAVA is not None and shutil.which("mvn") is not None
    return System(
        name=f"rocketmq {VERSION}",
        level=Level.MEMORY,
        puts="",
        gets="",
        program=Path(JAVA) if JAVA and found else None,
        hint="apt-get install default-jre-headless maven",
        command=_command,
        ping=encode_request(Request.GET_BROKER_RUNTIME_INFO, 1, {}),
        pong=b'"code":0',
    )


def _command(folder: Path, port: int) -> Sequence[str]:
    home = folder / "home"
    (home / "conf").mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "logback_broker.xml", home / "conf")
    settings = folder / "broker.conf"
    settings.write_text(SETTINGS.format(port=port, folder=folder), "ascii")
    place = (f"-Drocketmq.home.dir={home}", "-cp", f"{jars()}/*")
    return (*HEAP, *OPENED, *place, "org.apache.rocketmq.broker.BrokerStartup", "-c", str(settings))


def jars() -> Path:
    """Return the folder with the broker's jars, fetched unless they are there; one process at a time."""
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        if not any(JARS.glob("rocketmq-broker-*.jar")):
            fetch = ["mvn", "-q", "-B", "-f", str(HERE / "pom.xml"), "dependency:copy-dependencies"]
            done = subprocess.run(fetch, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
            if done.returncode:
                raise MeasurementError(f"Maven did not fetch RocketMQ: {(done.stdout + done.stderr)[-1000:]}")
    return JARS
