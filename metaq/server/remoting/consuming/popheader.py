"""The header of a pop, read by hand: in general form (``decode_header``) it takes as long as the pop itself."""

from typing import Final

from metaq.protocol.remoting.frames import Fields
from metaq.protocol.remoting.headers import Int32, decode_header, parse_int
from metaq.protocol.remoting.leases.pop import PopMessage

_DIGITS: Final = {32: 9, 64: 18}
"""So many digits are a number of so many bits in any case."""


def read_pop_header(fields: Fields) -> PopMessage:
    """Return the header in the fields of a pop. Raise ``BadRequest`` for a missing or wrong field."""
    get = fields.get
    try:
        return PopMessage(
            fields["consumerGroup"],
            fields["topic"],
            Int32(_number(fields, "queueId", 32)),
            Int32(_number(fields, "maxMsgNums", 32)),
            _number(fields, "invisibleTime", 64),
            _number(fields, "pollTime", 64),
            Int32(_number(fields, "initMode", 32)),
            _number(fields, "bornTime", 64) if "bornTime" in fields else 0,
            get("expType"),
            get("exp"),
            get("order", "false").lower() == "true",
            get("attemptId"),
            get("bname"),
        )
    except KeyError:
        return decode_header(PopMessage, fields)  # it says which field is missing


def _number(fields: Fields, name: str, bits: int) -> int:
    text = fields[name]
    if len(text) <= _DIGITS[bits] and text.isascii() and text.isdecimal():
        return int(text)
    return parse_int(name, text, bits)
