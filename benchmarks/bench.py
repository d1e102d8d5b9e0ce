"""The parts that the suites share: the systems of this run, their folders, and measuring one cell on a fresh server."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from benchmarks.figures import Load, MeasurementError
from benchmarks.peers import Level, System
from benchmarks.programs import LoadPlan, run_load

Figure = TypeVar("Figure")

# Puts of one cell stop at this many bytes of bodies, so that big bodies neither fill the memory of the servers that
# keep everything there nor make the kernel write back in the middle of the measurement.
CELL_BYTES = 2 << 30


@dataclass
class Bench:
    """One run of the benchmarks. `notes` collects what was left out, `failures` what went wrong; both are reported."""

    console: Console
    folder: Path
    systems: list[System]
    chosen_rounds: int | None
    quick: bool
    backlog: int | None = None
    """The messages of the smaller backlog, in place of its own number."""
    before: Path | None = None
    """The program `metaq` of an earlier version, which the suite `timers` compares with."""
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _folders: int = 0

    def rounds(self, usual: int) -> int:
        """Rounds of a suite: what the caller asked for, or its usual number, or one when quick."""
        return self.chosen_rounds or (1 if self.quick else usual)

    def usable(self, system: System) -> bool:
        """Is the system chosen and installed? What is not installed becomes a note, once."""
        if system.name not in {chosen.name for chosen in self.systems}:
            return False
        if not system.available:
            note = f"{system.name} was not measured: {system.hint}"
            if note not in self.notes:
                self.notes.append(note)
        return system.available

    def storing(self) -> list[System]:
        """The usable brokers, for suites that do not put: peers at one level, since syncing changes only their puts."""
        brokers = [system for system in self.systems if system.gets]
        chosen = [system for system in brokers if system.gets == "metaq-get" or system.level is Level.MEMORY]
        return [system for system in chosen if self.usable(system)]

    @contextmanager
    def fresh_folder(self) -> Iterator[Path]:
        """An empty folder that is gone afterwards, after everything written before has reached the disk."""
        os.sync()  # else the write-back of the cell before is charged to the next
        self._folders += 1
        folder = self.folder / str(self._folders)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    def attempt(self, what: str, measure: Callable[[], Figure]) -> Figure | None:
        """Take one figure. A failure is noted and shown, and the run goes on without the figure."""
        try:
            return measure()
        except MeasurementError as error:
            self.failures.append(f"{what}: {error}")
            self.console.print(f"[red]{what}: {error}[/red]", highlight=False)
            return None

    def put(self, system: System, plan: LoadPlan) -> Load | None:
        """Measure puts on a fresh server that nothing is stored in."""

        def measure() -> Load:
            with self.fresh_folder() as folder, system.running(folder / "server") as server:
                return run_load(system.puts, server.port, bounded(plan))

        name = f"{system.name}, put {describe(plan)}"
        load = self.attempt(name, measure)
        self.show(name, load)
        return load

    def show(self, name: str, load: Load | None) -> None:
        if load is not None:
            rate = f"{load.messages_per_second:,.0f}/s  {load.mb_per_second:,.1f} MB/s  p99 {load.p99_us / 1000:.2f} ms"
            self.console.print(f"{name}: {rate}", highlight=False)


def bounded(plan: LoadPlan) -> LoadPlan:
    most = max(1, CELL_BYTES // max(1, plan.body_bytes))
    return replace(plan, count=min(most, plan.count or most))


def describe(plan: LoadPlan) -> str:
    pace = f" at {plan.rate:,}/s" if plan.rate else f" × {plan.in_flight}"
    size = f"{plan.batch} × {plan.body_bytes}" if plan.batch else f"{plan.body_bytes}"
    return f"{size} B, {plan.connections}{pace}"


def raw(name: str, number: int, load: Load | None) -> Mapping[str, object]:
    """One cell for the JSON file; figures are null where the measurement failed."""
    return {"system": name, "round": number, "figures": load.model_dump() if load else None}
