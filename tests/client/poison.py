"""Messages whose body contradicts their system flag, as a client of any language may send them."""

import zlib
from typing import Final

from metaq.client import Client, SendResult
from metaq.client.message import properties_text
from metaq.client.sending.sending import Outgoing, QueueChoice, deliver, send_fields
from metaq.protocol.properties import UNIQUE_KEY
from metaq.protocol.remoting.codes import Request

ZLIB: Final = 0x301
POISON: Final = {
    b"no zlib": ZLIB,
    zlib.compress(b"cut" * 100)[:-3]: 1,
    b"no lz4": 0x101,
    b"no zstd": 0x201,
    b"a way of the future": 0x401,
    zlib.compress(bytes(17 << 20)): ZLIB,
}
"""Bodies and their flags; the last one is larger than readers take."""


def send_packed(client: Client, topic: str, body: bytes, sys_flag: int) -> SendResult:
    """Send a body that is said to be compressed."""
    core = client._core
    unique = core.unique_ids.next()
    fields = send_fields("poisoners", topic, properties_text({UNIQUE_KEY: unique}), sys_flag, 0)
    outgoing = Outgoing(topic, fields, body, Request.SEND_MESSAGE_V2, (unique,), None)
    return deliver(core.transport, QueueChoice(core.routes, core.health), outgoing, core.deadline())[0]
