"""The figures of several rounds by name, each shown as soon as it is there."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from benchmarks.bench import Bench, raw
from benchmarks.figures import Load, spread
from benchmarks.peers import Server
from benchmarks.programs import LoadPlan, run_load
from benchmarks.report import Table, of_rounds


@dataclass
class Rounds:
    """What the rounds of a suite have measured; `seconds` and `warmup` are those of every load."""

    bench: Bench
    seconds: float
    warmup: float
    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cells: list[Mapping[str, object]] = field(default_factory=list)

    def add(self, name: str, value: float) -> float:
        """Take one round of a figure."""
        self.values[name].append(value)
        self.cells.append({"system": name, "round": len(self.values[name]), "value": value})
        self.bench.console.print(f"{name}: {value:,.2f}", highlight=False)
        return value

    def rate(self, name: str, server: Server, protocol: str, plan: LoadPlan) -> float:
        """Load a server for `seconds`; messages a second."""
        load = run_load(protocol, server.port, replace(plan, seconds=self.seconds, warmup_seconds=self.warmup))
        self.note(name, load)
        return load.messages_per_second

    def note(self, name: str, load: Load) -> None:
        """Take the rate of a load as a round of a figure."""
        name = f"{name}, messages/s"
        self.values[name].append(load.messages_per_second)
        self.cells.append(raw(name, len(self.values[name]), load))
        self.bench.show(name, load)

    def attempt(self, what: str, measure: Callable[[], None]) -> None:
        """Measure; what fails is noted, and the run goes on."""
        self.bench.attempt(what, measure)

    def median(self, name: str) -> float | None:
        """The median of the rounds; None when there is none."""
        found = spread(self.values.get(name, []))
        return found.median if found else None

    def table(self, title: str) -> Table:
        """All figures, in the order in which they came first."""
        rows = [[name, of_rounds(spread(values), 0 if max(values) >= 100 else 2)] for name, values in self.values.items()]
        return Table(title, ["", "median of rounds"], rows)
