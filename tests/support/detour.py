"""A replica that connects to masters by a detour: run as a program with the flags of ``metaq serve``.

The file ``detours2.json`` beside the data folder of replica 2 maps the addresses in ZooKeeper to those used instead::

    {"127.0.0.1:7912":"127.0.0.1:40001"}
"""

import orjson

from metaq.address import Address, parse_address
from metaq.config import Settings
from metaq.server.replicas.replica import ReplicaServer
from metaq.store.recovery.progress import Tell
from tests.support.program import serve

DETOURS = "detours{}.json"


class DetouredReplica(ReplicaServer):
    """One whose connections to masters pass a proxy."""

    def __init__(self, settings: Settings, tell: Tell) -> None:
        path = settings.data.parent / DETOURS.format(settings.replica_number)
        self._detours: dict[str, str] = orjson.loads(path.read_bytes())
        super().__init__(settings, tell=tell)

    def _find_master(self) -> Address | None:
        master = super()._find_master()
        return None if master is None else parse_address(self._detours[str(master)])


if __name__ == "__main__":
    serve(DetouredReplica)
