"""Ways to store messages, each measured right after the one that it is compared with."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.bench import Bench, raw
from benchmarks.figures import Check, Load, spread
from benchmarks.peers import Level, metaq
from benchmarks.programs import LoadPlan
from benchmarks.report import Table, number, of_rounds


@dataclass(frozen=True)
class Sender:
    """One way to store messages; must and aim in parts of the rate that it is compared with."""

    name: str
    protocol: str
    in_flight: int = 100
    batch: int | None = None
    must: float | None = None
    aim: float | None = None


Pairs = Mapping[str, list[tuple[Load, Load]]]
"""By sender, what each round measured of it and, right before, of what it is compared with."""


@dataclass(frozen=True)
class Race:
    """Senders that are compared with one other, over so many connections and at one durability level."""

    base: Sender
    senders: Sequence[Sender]
    body_bytes: int
    connections: int = 4
    level: Level = Level.MEMORY

    def run(self, bench: Bench, rounds: int, seconds: float, warmup: float) -> tuple[Pairs, list[Mapping[str, object]]]:
        """All senders in turn in each round, each on a fresh broker."""
        pairs: defaultdict[str, list[tuple[Load, Load]]] = defaultdict(list)
        cells: list[Mapping[str, object]] = []
        for turn in range(1, rounds + 1):
            bench.console.print(f"round {turn} of {rounds}", highlight=False)
            for sender in self.senders:
                loads = []
                for each in (self.base, sender):
                    plan = LoadPlan(self.connections, each.in_flight, self.body_bytes, seconds, warmup, batch=each.batch)
                    load = bench.put(replace(metaq(self.level), name=each.name, puts=each.protocol), plan)
                    cells.append(raw(f"{each.name}, {self.level.value}", turn, load))
                    loads += [load] if load else []
                if len(loads) == 2:
                    pairs[sender.name].append((loads[1], loads[0]))
        return pairs, cells

    def checks(self, pairs: Pairs) -> list[Check]:
        """Return the checks of what each sender must reach."""
        return [
            Check(
                f"{self._title(sender)}: of {self.base.name}", of_base(pairs, sender), "at least", sender.must, sender.aim, "×"
            )
            for sender in self.senders
            if (sender.must, sender.aim) != (None, None)
        ]

    def _title(self, sender: Sender) -> str:
        return f"{sender.name}, {self.body_bytes} B" + ("" if self.level is Level.MEMORY else f", {self.level.value}")

    def table(self, pairs: Pairs, title: str) -> Table:
        """The rates, medians of all rounds."""
        bases = [base for measured in pairs.values() for _, base in measured]
        rows = [self._row(self.base, bases, 1.0)]
        rows += [self._row(each, [load for load, _ in pairs.get(each.name, [])], of_base(pairs, each)) for each in self.senders]
        return Table(title, ["", "messages/s", f"of {self.base.name}", "p50 ms", "p99 ms"], rows)

    def _row(self, sender: Sender, loads: Sequence[Load], part: float | None) -> list[str]:
        rates = [load.messages_per_second for load in loads]
        latencies = [[load.p50_us / 1000 for load in loads], [load.p99_us / 1000 for load in loads]]
        name = f"{sender.name}, {self.connections} × {sender.in_flight}"
        return [name, of_rounds(spread(rates)), number(part, 2), *(of_rounds(spread(row), 2) for row in latencies)]


def of_base(pairs: Pairs, sender: Sender) -> float | None:
    """The median over the rounds: the machine's speed drifts more than that of two cells next to each other differs."""
    found = spread([load.messages_per_second / base.messages_per_second for load, base in pairs.get(sender.name, [])])
    return found.median if found else None
