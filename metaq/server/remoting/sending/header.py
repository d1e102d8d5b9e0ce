"""The header of a send: read from its fields, and the message that it describes."""

import struct
from typing import Final

from metaq.engine.writing import CLEARED, Draft
from metaq.protocol import properties
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import Int32, SendMessage, decode_header, with_names
from metaq.store.queues.consumequeue import ConsumeQueue

NAMED: Final = (Request.SEND_MESSAGE, Request.SEND_REPLY_MESSAGE)
"""The requests whose fields are named in full; the others have letters."""


def read_header(request: RemotingCommand) -> SendMessage:
    """Return a send's header, with fields named in full for 10 and 324, by letters for the others.

    Raise ``BadRequest`` for a bad field.
    """
    fields = request.fields
    if request.code in NAMED:
        return decode_header(SendMessage, fields)
    get = fields.get
    try:
        header = SendMessage(
            producer_group=fields["a"],
            topic=fields["b"],
            default_topic=fields["c"],
            default_topic_queue_nums=Int32(int(fields["d"])),
            queue_id=Int32(int(fields["e"])),
            sys_flag=Int32(int(fields["f"])),
            born_timestamp=int(fields["g"]),
            flag=Int32(int(fields["h"])),
            properties=get("i"),
            reconsume_times=Int32(int(get("j", "0"))),
            unit_mode=get("k") == "true",
            max_reconsume_times=None if "l" not in fields else Int32(int(fields["l"])),
            batch=get("m") == "true",
        )
        numbers = (header.sys_flag, header.flag, header.reconsume_times)
        struct.pack(">iiiq", *numbers, header.born_timestamp)
    except (KeyError, ValueError, struct.error):
        return decode_header(SendMessage, with_names(fields))
    return header


def draft_of(header: SendMessage, body: bytes, queue: ConsumeQueue, born_host: bytes) -> Draft:
    """Return a sent message as a draft for a partition; ``born_host`` is the address of its sender."""
    return Draft(
        topic=queue.topic,
        partition=queue.partition,
        body=body,
        properties=properties.parse(header.properties or ""),
        flag=header.flag,
        sys_flag=header.sys_flag & CLEARED,
        born_ms=header.born_timestamp,
        born_host=born_host,
        reconsume_times=header.reconsume_times,
    )
