"""Committed offsets of consumers after a failover, and how far it may take them back."""

import time
from pathlib import Path
from typing import Final

from metaq.client import TextClient
from metaq.engine.offsets.offsetlog import MOST_BACK_S
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import Int32, QueryConsumerOffset, UpdateConsumerOffset, encode_header
from tests.cluster.history import Commit
from tests.support.broker import BrokerProcess, wait_until
from tests.support.cluster import PATIENT, Cluster
from tests.support.remoting import RemotingClient

PLACE: Final = ("group", "t", Int32(0))
DEADLINE_S: Final = 60.0
PAUSE_S: Final = 0.05
MESSAGES: Final = 200
"""More than commits are taken: an offset beyond the end of a partition is taken back by any start."""


def known(broker: BrokerProcess) -> int:
    """Where the group goes on, as a replica knows it."""
    with RemotingClient(broker.host, broker.port) as client:
        answer = client.call(Request.QUERY_CONSUMER_OFFSET, encode_header(QueryConsumerOffset(*PLACE)))
    return int(answer.fields.get("offset", 0))


def test_no_more_than_a_second_of_commits(tmp_path: Path) -> None:
    """MQ-035, F-PART: a master whose slaves do not hear it takes commits for a second, and then says that it is busy."""
    commits: list[Commit] = []
    with Cluster(tmp_path, *PATIENT) as cluster:
        master, slave, proxy = cluster.proxied_pair()
        with TextClient(master.host, master.port) as client:
            client.create("t", 1)
            for number in range(MESSAGES):
                client.put("t", b"%d" % number)
        with RemotingClient(master.host, master.port) as consumer:

            def commit() -> int:
                offset, asked = len(commits) + 1, time.monotonic()
                header = encode_header(UpdateConsumerOffset(*PLACE, offset))
                code = int(consumer.call(Request.UPDATE_CONSUMER_OFFSET, header).code)
                if code == Response.SUCCESS:
                    commits.append(Commit(asked, time.monotonic(), offset))
                return code

            def taken() -> bool:
                return commit() == Response.SUCCESS and known(slave) > 0

            wait_until(taken, DEADLINE_S, "the slave has some commits", PAUSE_S)
            proxy.partition()
            wait_until(lambda: commit() == Response.SYSTEM_BUSY, DEADLINE_S, "no commit is taken any more", PAUSE_S)
        master.kill()
        slave.promote()
        lost = [one for one in commits if one.offset > known(slave)]
    assert lost, "those of the last moments before the partition, at least"
    assert lost[0].offset > 1
    assert lost[-1].asked - lost[0].answered <= MOST_BACK_S
