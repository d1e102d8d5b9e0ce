"""SIGKILL while recurring messages run: of each definition every due time is delivered exactly once.

A case is the life of one data folder, which outlives ``KILLS`` kills, with some definitions of an interval of one or two
seconds and ``missed: all``. They are defined again, ended and defined anew between kills.
After the last one it is checked that the due times of each definition follow each other without a gap and without a
double, that what was ended came no more, and that one run is pending of each.

``python -m tests.crash.recurring --seed 7 --count 400`` runs it; a failure names the seed.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from base64 import b64encode
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from metaq.protocol.remoting.codes import Request
from metaq.store.recovery.verify import verify
from tests.crash.command import Result, expect
from tests.crash.driver import CaseFailed
from tests.support.admin import ask, connect, create_topic
from tests.support.broker import BrokerProcess, wait_until
from tests.support.messages import count, pairs_of, records
from tests.support.remoting import RemotingClient

KILLS: Final = 20
DEFINITIONS: Final = 5
TOPIC: Final = "later"
DEADLINE_S: Final = 60.0


def run(seed: int, count: int) -> Result:
    """Kill at least ``count`` times, in cases from ``seed`` on."""
    seeds = range(seed, seed + -(-count // KILLS))
    details: Counter[str] = Counter()
    for case in seeds:
        details.update(one_case(case))
    return Result("recurring", seeds, details["kills"], dict(details))


def one_case(seed: int, kills: int = KILLS) -> dict[str, int]:
    """Live one data folder; return what it saw. It is removed unless something is wrong."""
    folder = Path(tempfile.mkdtemp(prefix=f"metaq-recurring-{seed}-"))
    life = Life(seed, folder)
    try:
        life.live(kills)
    except Exception as error:
        raise CaseFailed(f"{error!r}\nfolder: {folder}\nreplay: python -m tests.crash.recurring --seed {seed}") from error
    finally:
        life.broker.kill()
    shutil.rmtree(folder)
    return dict(life.counts)


class Life:
    """One data folder from its beginning to its end."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._rng = random.Random(seed)
        flags = {
            "max-body-bytes": 4096,
            "segment-bytes": 262_144,
            "checkpoint-interval-ms": self._rng.choice((10, 200, 5000)),
            "sweep-interval-ms": self._rng.choice((10, 250)),
            "timer-engine": self._rng.choice(("rocksdict", "sqlite3")),
        }
        self.broker = BrokerProcess(
            folder / "data",
            *(text for name, value in flags.items() for text in (f"--{name}", str(value))),
            durability=self._rng.choice(("disk", "memory")),
        )
        self.counts: Counter[str] = Counter()

    def live(self, kills: int) -> None:
        self.broker.start()
        with connect(self.broker) as client:
            create_topic(client, TOPIC)
            for number in range(DEFINITIONS):
                self._define(client, number)
        for _ in range(kills):
            time.sleep(self._rng.uniform(0, 1.5))
            if self._rng.random() < 0.4:
                with connect(self.broker) as client:
                    self._change(client, self._rng.randrange(DEFINITIONS))
            self.broker.kill()
            self.counts["kills"] += 1
            self.broker.start()
        self._end()

    def _define(self, client: RemotingClient, number: int) -> None:
        body = b64encode(b"%d" % number).decode()
        every = f"@every {self._rng.randint(1, 2)}s"
        self._ask(client, {"do": "define", "name": f"n{number}", "cron": every, "topic": TOPIC, "body": body, "missed": "all"})

    def _ask(self, client: RemotingClient, request: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(bytes(ask(client, Request.CRON, json.dumps(request).encode()).body) or b"{}")
        return found

    def _change(self, client: RemotingClient, number: int) -> None:
        """Define again, or end and define."""
        if self._rng.random() < 0.5:
            self._ask(client, {"do": "undefine", "name": f"n{number}"})
            self.counts["ended"] += 1
        self._define(client, number)
        self.counts["defined again"] += 1

    def _end(self) -> None:
        with connect(self.broker) as client:
            before = count(client, TOPIC)
            wait_until(lambda: count(client, TOPIC) > before + DEFINITIONS, DEADLINE_S, "all go on")
            rows = self._ask(client, {"do": "list"})["rows"]
            expect(len(rows) == DEFINITIONS and all(row["due_ms"] for row in rows), "each has a next run", rows)
            for number in range(DEFINITIONS):
                self._ask(client, {"do": "undefine", "name": f"n{number}"})
            listed = json.loads(bytes(ask(client, Request.LIST_TIMERS).body))["rows"]
            expect(listed == [], "with its definition a run ends", listed)
            self._check(client)
        expect(self.broker.terminate() == 0, "an orderly stop", self.broker.stderr()[-2000:])
        expect("Traceback" not in self.broker.stderr(), "no surprises", self.broker.stderr()[-2000:])
        report = verify(self.broker.data)
        expect(not report.damages and not report.quarantined_bytes, "no kill damages anything", report)

    def _check(self, client: RemotingClient) -> None:
        dues: dict[str, list[int]] = defaultdict(list)
        for record in records(client, TOPIC):
            pairs = pairs_of(record)
            dues[pairs["METAQ_CRON"]].append(int(pairs["TIMER_OUT_MS"]))
        for definition, times in dues.items():
            steps = {later - earlier for earlier, later in pairwise(times)}
            expect(len(steps) < 2 and steps <= {1000, 2000}, "each due time comes once, in order", definition, times)
        self.counts["runs"] += sum(map(len, dues.values()))
        self.counts["definitions"] += len(dues)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=KILLS)
    options = parser.parse_args()
    print(run(options.seed, options.count))


if __name__ == "__main__":
    main()
