"""Java MetaQ clients that have cut themselves off from a broker, and what brings them back.

When the brokers of its topic change, the client (1.4.6.2) closes its connection to each of them and opens another one at
once. If one of its threads removes the old one just while another thread counts them, the client takes the new one for one
too many, logs so, and closes it. Then it has none until the brokers change again. No broker can prevent that, so a test that
changes brokers waits by ``wait_connected`` for what its clients do.
"""

from collections.abc import Callable
from typing import Final

from kazoo.client import KazooClient

from metaq.registry.paths import TOPICS_TO_PUBLISH, TOPICS_TO_SUBSCRIBE, Layout, Replica, encode_partitions
from tests.interop.metaq_java.driver import JavaMember
from tests.support.broker import wait_until

LAYOUT: Final = Layout()
TREES: Final = (TOPICS_TO_PUBLISH, TOPICS_TO_SUBSCRIBE)


def wait_connected(
    condition: Callable[[], bool], deadline_s: float, what: str, look: KazooClient, topic: str, *members: JavaMember
) -> None:
    """``wait_until``; whenever a member has cut itself off, the brokers of the topic change."""

    def holds() -> bool:
        if condition():
            return True
        if any(member.has_cut_itself_off() for member in members):
            add_bystander(look, topic)
        return False

    wait_until(holds, deadline_s, what)


def add_bystander(look: KazooClient, topic: str) -> None:
    """Register one more broker, which has no partition of the topic, at the address of broker 0; it goes when ``look`` does."""
    number = 1 + max(int(name) for name in look.get_children(f"{LAYOUT.root}/brokers/ids"))
    bystander = Replica(number, None)
    address, _ = look.get(LAYOUT.broker(0))
    look.create(LAYOUT.replica(bystander), address, ephemeral=True, makepath=True)
    for tree in TREES:
        look.create(LAYOUT.topic(tree, topic, bystander), encode_partitions(0, bystander), ephemeral=True)
