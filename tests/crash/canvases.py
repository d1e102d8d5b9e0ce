"""Many tasks of Celery in those scenarios that count each of them: a canvas, and a broker that is killed; in both pools.

``python -m tests.crash.canvases --cases 1000`` runs the tests of integrations/kombu with a thousand tasks each.
"""

import argparse
import os
import subprocess
import sys
from typing import Final

from tests.crash.command import Result, expect
from tests.docs.examples import ROOT

FOLDER: Final = "integrations/kombu/tests"
SCENARIOS: Final = [
    f"{FOLDER}/test_kombu_celery.py::test_a_canvas_of_many_tasks_does_each_once",
    f"{FOLDER}/test_kombu_crashes.py::test_a_broker_that_is_killed_loses_no_task_and_repeats_none",
]
POOLS: Final = 2


def run(seed: int, count: int) -> Result:
    """Run each scenario in each pool with ``count`` tasks; the seed means nothing."""
    scenarios = len(SCENARIOS) * POOLS
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "1800", *SCENARIOS]
    environment = {**os.environ, "KOMBU_TASKS": str(count), "REQUIRE_PARTNERS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    expect(done.returncode == 0 and f"{scenarios} passed" in done.stdout, "each task is done once", done.stdout[-5000:])
    return Result("canvases", range(seed, seed + 1), count, {"scenarios": scenarios, "tasks": scenarios * count})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=60)
    print(run(0, parser.parse_args().cases).details)
