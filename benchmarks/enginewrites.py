"""`python -m benchmarks.enginewrites FOLDER SECONDS RATE`: how long each write of the index of timers stops its caller."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

from pydantic import BaseModel

from benchmarks.figures import MeasurementError, percentile
from benchmarks.programs import parse
from metaq.store.ordered.engine import SetKey
from metaq.store.ordered.ordered import Covered, open_ordered
from metaq.timers.entering import TIMER
from metaq.timers.records import key_of

BATCH = 64
SPREAD_MS = 30 * 86_400_000


class Writes(BaseModel):
    """Milliseconds of the writes of one run."""

    writes: int
    p50_ms: float
    p999_ms: float
    max_ms: float
    refused: int


def measure_writes(folder: Path, seconds: float, rate: int) -> Writes:
    """Write timers that are due at random within 30 days, `rate` a second, in a process of their own: it must not fork."""
    command = [sys.executable, "-m", "benchmarks.enginewrites", str(folder), str(seconds), str(rate)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=False)
    if done.returncode:
        raise MeasurementError(done.stderr.strip()[-500:])
    return parse(Writes, done.stdout)


def _write(folder: Path, seconds: float, rate: int) -> Writes:
    index, _ = open_ordered(folder, "rocksdict")
    taken, refused, place, now_ms = [], 0, 0, time.time_ns() // 1_000_000
    due = time.perf_counter()
    for _ in range(round(seconds * rate / BATCH)):
        batch = []
        for _ in range(BATCH):
            place += 300
            batch.append(SetKey(TIMER + key_of(now_ms + random.randrange(SPREAD_MS), place)))
        time.sleep(max(0.0, due - time.perf_counter()))
        begun = time.perf_counter()
        is_applied = index.apply(batch, Covered(place, 0))
        taken.append(1000 * (time.perf_counter() - begun))
        refused += not is_applied
        due += BATCH / rate
    index.close()
    return Writes(
        writes=len(taken), p50_ms=percentile(taken, 0.5), p999_ms=percentile(taken, 0.999), max_ms=max(taken), refused=refused
    )


if __name__ == "__main__":
    print(json.dumps(_write(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])).model_dump()))
