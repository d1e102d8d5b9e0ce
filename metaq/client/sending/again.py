"""PURE: the properties of a dead letter that is sent to its topic again, as a new message."""

from typing import Final

from metaq.client.message import RESERVED, ReceivedMessage
from metaq.protocol.properties import ORIGIN_ID

ORIGIN: Final = "DLQ_ORIGIN_MESSAGE_ID"
"""Property of a message that was sent again: the id of the dead letter. RocketMQ 5 uses the same name on its dead letters."""
PLACE: Final = "METAQ_DEAD_LETTER"
"""Property of a message that was sent again: the dead letter's group, and its id from the broker."""
_NOT_AGAIN: Final = RESERVED | {ORIGIN_ID, ORIGIN, PLACE}


def properties_again(letter: ReceivedMessage, group: str) -> dict[str, str]:
    """Return the sender's own properties of a dead letter, and marks that say which letter of which group it was."""
    kept = {name: value for name, value in letter.properties.items() if name not in _NOT_AGAIN}
    return {**kept, ORIGIN: letter.id, PLACE: f"{group}@{letter.offset_id}"}
