"""The C programs of the benchmarks: how they are built, and run if they measure."""

import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from benchmarks.figures import Load, MeasurementError, SyncLoop

HERE = Path(__file__).parent
BUILD = HERE / ".build"

Line = TypeVar("Line", bound=BaseModel)


def build(source: Path, libraries: Sequence[str] = ()) -> Path:
    """Compile one C file with `gcc -O2` into the ignored build folder, unless it is there already; one process at a time."""
    parts = [source, *sorted(source.parent.glob("*.h"))]
    digest = hashlib.sha256(b"\0".join(part.read_bytes() for part in parts)).hexdigest()[:12]
    program = BUILD / f"{source.stem}-{digest}"
    if program.exists():
        return program
    if shutil.which("gcc") is None:
        raise MeasurementError("the benchmarks need gcc: apt-get install gcc libc6-dev")
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        if not program.exists():
            for stale in BUILD.glob(f"{source.stem}-*"):
                stale.unlink()
            _compile(source, libraries, program)
    return program


def _compile(source: Path, libraries: Sequence[str], program: Path) -> None:
    fresh = program.with_suffix(".new")
    made = subprocess.run(
        ["gcc", "-O2", "-o", str(fresh), str(source), *(f"-l{name}" for name in libraries)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if made.returncode:
        raise MeasurementError(f"gcc refused {source.name}:\n{made.stderr}")
    fresh.rename(program)


@dataclass(frozen=True)
class LoadPlan:
    """The parameters of one run of the load generator. `count` bounds the messages, `rate` (1/s) makes it an open loop.

    `batch` is how many messages a put in batches brings, or a get or a pop asks for; gets ask for a full block without it.
    `first` begins the numbers of the messages. Delayed ones are due `delay_ms` after they were sent, or at `due_ms`, Unix
    time, and at random within `spread_ms` of that.
    """

    connections: int
    in_flight: int
    body_bytes: int
    seconds: float
    warmup_seconds: float = 0.3
    count: int | None = None
    rate: int | None = None
    block_bytes: int = 65536
    batch: int | None = None
    topic: str | None = None
    group: str | None = None
    first: int | None = None
    delay_ms: int | None = None
    due_ms: int | None = None
    spread_ms: int | None = None

    def command(self, protocol: str, port: int) -> list[str]:
        options = {
            "protocol": protocol,
            "port": port,
            "connections": self.connections,
            "in-flight": self.in_flight,
            "body": self.body_bytes,
            "block": self.block_bytes,
            "batch": self.batch,
            "duration-ms": round(self.seconds * 1000),
            "warmup-ms": round(self.warmup_seconds * 1000),
            "count": self.count,
            "rate": self.rate,
            "topic": self.topic,
            "group": self.group,
            "first": self.first,
            "delay-ms": self.delay_ms,
            "due-ms": self.due_ms,
            "spread-ms": self.spread_ms,
        }
        given = [f"--{name}={value}" for name, value in options.items() if value is not None]
        return [str(build(HERE / "load.c")), *given]

    @property
    def deadline_seconds(self) -> float:
        """Loading stops after seconds + warm-up and gives up 15 s after the last reply; this is never reached."""
        return self.seconds + self.warmup_seconds + 60


def run_load(protocol: str, port: int, plan: LoadPlan) -> Load:
    """Load the server on a loopback port. A figure in which any reply was an error is no figure: it raises."""
    return run_loads(port, (protocol, plan))[0]


def run_loads(port: int, *loads: tuple[str, LoadPlan]) -> list[Load]:
    """Run several load generators at once, each with its protocol; all are over when this returns."""
    running = [
        subprocess.Popen(plan.command(protocol, port), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for protocol, plan in loads
    ]
    try:
        deadline = max(plan.deadline_seconds for _, plan in loads)
        return [result_of(process, deadline) for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()


def result_of(process: "subprocess.Popen[str]", deadline_seconds: float) -> Load:
    """Wait for a load generator, and return its figures; what is no figure raises."""
    out, errors = process.communicate(timeout=deadline_seconds)
    if process.returncode not in {0, 1}:
        raise MeasurementError(errors.strip() or f"load ended with {process.returncode}")
    load = parse(Load, out)
    if load.errors:
        raise MeasurementError(f"{load.errors} of {load.requests} replies were errors, the first: {load.first_error}")
    if load.messages == 0:
        raise MeasurementError("no message passed in the measured time")
    return load


def run_sync_loop(folder: Path, record_bytes: int, seconds: float, rate: int) -> SyncLoop:
    """Run the bare pwrite + fdatasync loop on a file of its own in the folder; rate 0 is back to back."""
    file = folder / "sync-loop"
    command = [str(build(HERE / "limits.c")), "fdatasync", str(file), str(record_bytes), str(round(seconds * 1000))]
    try:
        done = subprocess.run([*command, str(rate)], capture_output=True, text=True, timeout=seconds + 60, check=False)
    finally:
        file.unlink(missing_ok=True)
    if done.returncode:
        raise MeasurementError(done.stderr.strip())
    return parse(SyncLoop, done.stdout)


def parse(kind: type[Line], text: str) -> Line:
    """Read the one JSON line that a measuring program prints."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise MeasurementError(f"not a line of {kind.__name__}: {text[:200]!r}") from error
