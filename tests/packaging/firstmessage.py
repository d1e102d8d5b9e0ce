"""The time from nothing to the first message: python -m tests.packaging.firstmessage

Prints the seconds of each step, and the broker's resident memory after them, and ends with 1 when that is more than
MOST_SECONDS in all, or than MOST_KIB. It assumes an idle machine with a warm pip cache; run it twice when the cache is cold.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.packaging.built import MOST_KIB, build, install, run, serving

MOST_SECONDS: Final = 60
"""P15: from nothing to the first message."""


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _, wheel = build(folder)
        began = time.monotonic()
        binaries = install(wheel, folder / "environment")
        installed = time.monotonic()
        with serving(binaries, folder / "broker") as broker:
            ready = time.monotonic()
            run(binaries / "metaq", "put", "hello", "world", "--broker", broker.address, cwd=folder)
            stored = time.monotonic()
            assert run(binaries / "metaq", "get", "hello", "--broker", broker.address, cwd=folder) == "world\n"
            got = time.monotonic()
            resident = broker.resident_kib()
        print(f"environment and pip install  {installed - began:6.1f} s")
        print(f"until it serves              {ready - installed:6.1f} s")
        print(f"first message put            {stored - ready:6.1f} s")
        print(f"first message got            {got - stored:6.1f} s")
        print(f"in all                       {got - began:6.1f} s")
        print(f"resident                     {resident / 1024:6.1f} MiB, {resident} KiB")
        if got - began > MOST_SECONDS or resident > MOST_KIB:
            sys.exit(f"more than {MOST_SECONDS} s or {MOST_KIB} KiB")


if __name__ == "__main__":
    main()
