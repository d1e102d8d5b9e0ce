"""SIGKILL while recurring messages run: of each definition every due time is delivered exactly once.

A case is the life of one data folder, which outlives many kills, with some definitions of an interval of one or two
seconds and ``missed: all``. They are defined again, ended and defined anew between kills.
After the last one it is checked that the due times of each definition follow each other without a gap and without a
double, that what was ended came no more, and that one run is pending of each.

``python -m tests.crash.recurring --seed 7 --count 400`` runs it; a failure names the seed.
"""

import json
import time
from base64 import b64encode
from collections import defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from metaq.protocol.remoting.codes import Request
from tests.crash.command import expect
from tests.crash.lives import Life, main, one_life, run_lives
from tests.support.admin import ask, connect, create_topic
from tests.support.broker import wait_until
from tests.support.messages import count, pairs_of, records
from tests.support.remoting import RemotingClient

DEFINITIONS: Final = 5
TOPIC: Final = "later"
DEADLINE_S: Final = 60.0


class RecurringLife(Life):
    """One data folder from its beginning to its end."""

    name = "recurring"
    most_kills = 20

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder)
        flags = {
            "max-body-bytes": 4096,
            "segment-bytes": 262_144,
            "checkpoint-interval-ms": self._rng.choice((10, 200, 5000)),
            "sweep-interval-ms": self._rng.choice((10, 250)),
            "timer-engine": self._rng.choice(("rocksdict", "sqlite3")),
        }
        self._set(flags)

    def live(self, kills: int) -> None:
        self._start()
        with connect(self.broker) as client:
            create_topic(client, TOPIC)
            for number in range(DEFINITIONS):
                self._define(client, number)
        for _ in range(kills):
            time.sleep(self._rng.uniform(0, 1.5))
            if self._rng.random() < 0.4:
                with connect(self.broker) as client:
                    self._change(client, self._rng.randrange(DEFINITIONS))
            self._kill()
            self._start()
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
        self._stop()

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


one_case: Final = partial(one_life, RecurringLife)
run: Final = partial(run_lives, RecurringLife)

if __name__ == "__main__":
    main(RecurringLife)
