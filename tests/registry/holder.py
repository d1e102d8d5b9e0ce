"""A process that holds a lease: it keeps /held, and prints the end of its lease (monotonic, in seconds) at each renewal.

``python -m tests.registry.holder HOSTS SESSION_MS``
"""

import sys
import time

from metaq.clock import SystemClock
from metaq.registry.zookeeper import ZooKeeper


def main() -> None:
    zookeeper = ZooKeeper(sys.argv[1], int(sys.argv[2]), SystemClock())
    zookeeper.keep("/held", lambda: b"")
    zookeeper.start()
    zookeeper.hold_lease()
    before = 0.0
    while True:
        if zookeeper.lease_end != before:
            before = zookeeper.lease_end
            print(before, flush=True)
        time.sleep(0.001)


if __name__ == "__main__":
    main()
