"""The golden vectors of the text protocol: bytes that the Java client and broker agree on.

V36 and V37 are node data of the registry; its tests contain them.
"""

from typing import Final

import pytest

from metaq.checksum import body_crc
from metaq.errors import CorruptRecord
from metaq.message import Message, TextPosition
from metaq.protocol.record import TAGS, encode_properties
from metaq.protocol.text.codec import CommandReader, TextLimits
from metaq.protocol.text.commands import (
    BROKER_CHOOSES,
    END_OF_LOG,
    NO_CHECKSUM,
    Command,
    Get,
    Offset,
    Put,
    Stats,
    Sync,
    Transaction,
    Version,
)
from metaq.protocol.text.messages import decode_text_messages, join_attribute, split_attribute
from metaq.protocol.text.replies import VALUE, Reply, write_result, write_value_head
from metaq.protocol.text.writing import write_get, write_line, write_offset, write_put
from tests.support.talk import ReplyReader
from tests.support.wire import feed, slicings, stored_record, text_form

HEX: Final = {
    "V01": "707574206d6574612d746573742030203520302039303730363038373020310d0a68656c6c6f",
    "V02": "707574206d6574612d7465737420302035203020310d0a68656c6c6f",
    "V03": "726573756c742032303020323220310d0a34303330393038313535363936323530383820302030",
    "V04": "000000053610a686059810f60a4000000000000068656c6c6f",
    "V05": "707574206d6574612d74657374203020313120312032383735353037333120320d0a00000005636f6c6f726869",
    "V06": "0000000b1123ad0b059810f60a4000010000000100000005636f6c6f726869",
    "V07": "0000000000000000059810f60a80500000000000",
    "V08": "00000007733cd2ff059810f60a400000000000006d657461712d30",
    "V09": "676574206d6574612d74657374206578616d706c6520302030203130343835373620330d0a",
    "V10": (
        "76616c756520373620330d0a000000053610a686059810f60a4000000000000068656c6c6f0000000b1123ad0b059810f60a4000"
        "010000000100000005636f6c6f7268690000000000000000059810f60a80500000000000"
    ),
    "V11": "76616c756520343020340d0a000000053610a686059810f60a4000000000000068656c6c6f0000000b1123ad0b059810f60a4000",
    "V12": "676574206d6574612d74657374206578616d706c652030203736203130343835373620350d0a",
    "V12r": ("726573756c742034303420333720350d0a436f756c64206e6f742066696e64206d65737361676520617420706f736974696f6e203736"),
    "V13": (
        "676574206d6574612d74657374206578616d706c6520302039323233333732303336383534373735383037203130343835373620"
        "2d323134373438333634380d0a"
    ),
    "V13r": "726573756c74203330312032202d323134373438333634380d0a3736",
    "V14": "6f6666736574206d6574612d74657374206578616d706c65203020393939393920360d0a",
    "V14r": "726573756c7420323030203220360d0a3736",
    "V15": "76657273696f6e202d323134373438333634370d0a",
    "V15r": "726573756c74203230302037202d323134373438333634370d0a312e342e362e32",
    "V16": "73746174732020370d0a",
    "V16r": (
        "726573756c742032303020353720380d0a53544154530d0a6d6574612d7465737420706172742030206d696e5f6f666673657420"
        "30206d61785f6f66667365742037360d0a454e440d0a"
    ),
    "V17": (
        "7472616e73616374696f6e2054583a31302e302e302e392d313430303030303030303030302d313a312031302e302e302e392d31"
        "3430303030303030303030302d3120424547494e203720390d0a"
    ),
    "V17r": "726573756c7420323030203020390d0a",
    "V18": (
        "707574206d6574612d7465737420302032203020313533323237363237392054583a31302e302e302e392d313430303030303030"
        "303030302d313a312031300d0a7431"
    ),
    "V18r": "726573756c74203230302032332031300d0a3430333039303831353536393632353038392030202d31",
    "V19": (
        "7472616e73616374696f6e2054583a31302e302e302e392d313430303030303030303030302d313a312031302e302e302e392d31"
        "3430303030303030303030302d3120434f4d4d49545f4f4e455f50484153452031310d0a"
    ),
    "V20": (
        "7472616e73616374696f6e205849443a3130303a306130623a306330643a6d796170702d686f7374312031302e302e302e392d31"
        "3430303030303030303030302d3220424547494e203230206d796170702d686f7374312031320d0a"
    ),
    "V21": (
        "707574206d6574612d746573742031203220302032303131323931393633205849443a3130303a306130623a306330643a6d7961"
        "70702d686f7374312031330d0a7831"
    ),
    "V22": (
        "7472616e73616374696f6e205849443a3130303a306130623a306330643a6d796170702d686f7374312031302e302e302e392d31"
        "3430303030303030303030302d3220454e44206d796170702d686f7374312031340d0a7472616e73616374696f6e205849443a31"
        "30303a306130623a306330643a6d796170702d686f7374312031302e302e302e392d313430303030303030303030302d32205052"
        "4550415245206d796170702d686f7374312031350d0a"
    ),
    "V22r": "726573756c742032303020312031350d0a30",
    "V23": (
        "7472616e73616374696f6e206e756c6c2031302e302e302e392d313430303030303030303030302d32205245434f564552206d79"
        "6170702d686f7374312031360d0a"
    ),
    "V23r": (
        "726573756c74203230302036302031360d0a5849443a3130303a306130623a306330643a6d796170702d686f7374310d0a584944"
        "3a3130313a306130623a306330653a6d796170702d686f737431"
    ),
    "V24": (
        "726573756c74203530302039322031370d0a5841457863657074696f6e3a636f64653d2d342c6d73673d5841207472616e736163"
        "74696f6e20275849443a3130303a306130623a306330643a6d796170702d686f7374312720686173206e6f74206265656e207374"
        "61727465642e"
    ),
    "V25": (
        "73796e63206d6574612d7465737420302035203020343033303930383135353639363235303838203930373036303837302031380d0a68656c6c6f"
    ),
    "V26": "73796e63206d6574612d74657374203020352030203430333039303831353536393632353038382031380d0a68656c6c6f",
    "V27": "707574206d6574612d746573742030203520302031323334352031390d0a68656c6c6f",
    "V27r": (
        "726573756c7420353030203136302031390d0a507574206d65737361676520746f205b62726f6b657220276d6574613a2f2f3130"
        "2e302e302e313a38313233275d205b706172746974696f6e20276d6574612d746573742d30275d206661696c65642e4465746169"
        "6c3a436865636b73756d206661696c7572652c6d657373616765206d617920626520636f72727570746564207768656e20747261"
        "6e73666572696e67206f6e206e6574776f726b696e672e"
    ),
    "V28": "707574206d6574612d74657374202d3120352030203930373036303837302032300d0a68656c6c6f",
    "V28r": "726573756c74203230302032322032300d0a34303330393038313535363936323530383820312030",
    "V29": (
        "726573756c7420343033203131372032310d0a507574206d65737361676520746f205b62726f6b657220276d6574613a2f2f3130"
        "2e302e302e313a38313233275d205b706172746974696f6e20276d6574612d746573742d30275d206661696c65642e4465746169"
        "6c3a706172746974696f6e5b302d305d20686173206265656e20636c6f736564"
    ),
    "V30": (
        "726573756c7420353030203130342032320d0a507574206d65737361676520746f205b62726f6b657220276d6574613a2f2f3130"
        "2e302e302e313a38313233275d205b706172746974696f6e20276d6574612d746573742d39275d206661696c65642e4465746169"
        "6c3a77726f6e6720706172746974696f6e2039"
    ),
    "V31": (
        "726573756c74203430342034392032330d0a54686520746f70696320606e6f737563686020696e20706172746974696f6e206030"
        "60206973206e6f7420657869737473"
    ),
    "V32": "726573756c74203430302033302032340d0a42616420726571756573742c696e76616c6964206d61782073697a653a30",
    "V33": (
        "726573756c74203530302034392032350d0a4c6f63616c207472616e73616374696f6e202754583a53313a312720686173206e6f"
        "74206265656e20737461727465642e"
    ),
    "V34": "707574206d6574612d746573742030203220302054583a53313a312032360d0a7431",
    "V35": "707574206d6574612d74657374203020352030202d312032370d0a68656c6c6f",
}
VECTORS: Final = {name: bytes.fromhex(digits) for name, digits in HEX.items()}

TOPIC: Final = "meta-test"
GROUP: Final = "example"
MIB: Final = 1 << 20
COLOR: Final = b"\x00\x00\x00\x05colorhi"
LOCAL: Final = "TX:10.0.0.9-1400000000000-1:1"
LOCAL_SESSION: Final = "10.0.0.9-1400000000000-1"
XA: Final = "XID:100:0a0b:0c0d:myapp-host1"
XA_SESSION: Final = "10.0.0.9-1400000000000-2"
MANAGER: Final = "myapp-host1"
FIRST_ID: Final = 403090815569625088
WORKER_5_ID: Final = 403090815573839872

COMMANDS: Final[dict[str, list[Command]]] = {
    "V01": [Put(TOPIC, 0, 0, 907060870, None, "1", b"hello")],
    "V02": [Put(TOPIC, 0, 0, NO_CHECKSUM, None, "1", b"hello")],
    "V05": [Put(TOPIC, 0, 1, 287550731, None, "2", COLOR)],
    "V09": [Get(TOPIC, GROUP, 0, 0, MIB, "3", 0)],
    "V12": [Get(TOPIC, GROUP, 0, 76, MIB, "5", 0)],
    "V13": [Get(TOPIC, GROUP, 0, END_OF_LOG, MIB, "-2147483648", 0)],
    "V14": [Offset(TOPIC, GROUP, 0, 99999, "6")],
    "V15": [Version("-2147483647")],
    "V16": [Stats("", "7", item_only=False)],
    "V17": [Transaction(LOCAL, LOCAL_SESSION, "BEGIN", 7, "", "9")],
    "V18": [Put(TOPIC, 0, 0, 1532276279, LOCAL, "10", b"t1")],
    "V19": [Transaction(LOCAL, LOCAL_SESSION, "COMMIT_ONE_PHASE", 0, "", "11")],
    "V20": [Transaction(XA, XA_SESSION, "BEGIN", 20, MANAGER, "12")],
    "V21": [Put(TOPIC, 1, 0, 2011291963, XA, "13", b"x1")],
    "V22": [
        Transaction(XA, XA_SESSION, "END", 0, MANAGER, "14"),
        Transaction(XA, XA_SESSION, "PREPARE", 0, MANAGER, "15"),
    ],
    "V23": [Transaction("null", XA_SESSION, "RECOVER", 0, MANAGER, "16")],
    "V25": [Sync("18")],
    "V26": [Sync("18")],
    "V27": [Put(TOPIC, 0, 0, 12345, None, "19", b"hello")],
    "V28": [Put(TOPIC, BROKER_CHOOSES, 0, 907060870, None, "20", b"hello")],
    "V34": [Put(TOPIC, 0, 0, NO_CHECKSUM, "TX:S1:1", "26", b"t1")],
    "V35": [Put(TOPIC, 0, 0, NO_CHECKSUM, None, "27", b"hello")],
}

REFUSED_PUT: Final = "Put message to [broker 'meta://10.0.0.1:8123'] [partition 'meta-test-{}'] failed.Detail:"
RESULTS: Final[dict[str, tuple[int, str, str]]] = {
    "V03": (200, "1", "403090815569625088 0 0"),
    "V12r": (404, "5", "Could not find message at position 76"),
    "V13r": (301, "-2147483648", "76"),
    "V14r": (200, "6", "76"),
    "V15r": (200, "-2147483647", "1.4.6.2"),
    "V16r": (200, "8", "STATS\r\nmeta-test part 0 min_offset 0 max_offset 76\r\nEND\r\n"),
    "V17r": (200, "9", ""),
    "V18r": (200, "10", "403090815569625089 0 -1"),
    "V22r": (200, "15", "0"),
    "V23r": (200, "16", "XID:100:0a0b:0c0d:myapp-host1\r\nXID:101:0a0b:0c0e:myapp-host1"),
    "V24": (500, "17", f"XAException:code=-4,msg=XA transaction '{XA}' has not been started."),
    "V27r": (
        500,
        "19",
        REFUSED_PUT.format(0) + "Checksum failure,message may be corrupted when transfering on networking.",
    ),
    "V28r": (200, "20", "403090815569625088 1 0"),
    "V29": (403, "21", REFUSED_PUT.format(0) + "partition[0-0] has been closed"),
    "V30": (500, "22", REFUSED_PUT.format(9) + "wrong partition 9"),
    "V31": (404, "23", "The topic `nosuch` in partition `0` is not exists"),
    "V32": (400, "24", "Bad request,invalid max size:0"),
    "V33": (500, "25", "Local transaction 'TX:S1:1' has not been started."),
}

Content = tuple[int, int, str | None, bytes]
"""Id, flag, attribute and payload of a message."""
RECORDS: Final[dict[str, Content]] = {
    "V04": (FIRST_ID, 0, None, b"hello"),
    "V06": (FIRST_ID + 1, 1, "color", b"hi"),
    "V07": (WORKER_5_ID, 0, None, b""),
    "V08": (FIRST_ID, 0, None, b"metaq-0"),
}
VALUES: Final[dict[str, tuple[str, list[Content]]]] = {
    "V10": ("3", [RECORDS["V04"], RECORDS["V06"], RECORDS["V07"]]),
    "V11": ("4", [RECORDS["V04"]]),
}

WRITTEN: Final = {
    "V01": write_put(TOPIC, 0, 0, b"hello", 1),
    "V02": write_put(TOPIC, 0, 0, b"hello", 1, old=True),
    "V05": write_put(TOPIC, 0, 1, COLOR, 2),
    "V09": write_get(TOPIC, GROUP, 0, 0, MIB, 3),
    "V12": write_get(TOPIC, GROUP, 0, 76, MIB, 5),
    "V13": write_get(TOPIC, GROUP, 0, END_OF_LOG, MIB, -(1 << 31)),
    "V14": write_offset(TOPIC, GROUP, 0, 99999, 6),
    "V15": write_line("version", -2147483647),
    "V16": write_line("stats", "", 7),
    "V17": write_line("transaction", LOCAL, LOCAL_SESSION, "BEGIN", 7, 9),
    "V18": write_put(TOPIC, 0, 0, b"t1", 10, transaction=LOCAL),
    "V19": write_line("transaction", LOCAL, LOCAL_SESSION, "COMMIT_ONE_PHASE", 11),
    "V20": write_line("transaction", XA, XA_SESSION, "BEGIN", 20, MANAGER, 12),
    "V21": write_put(TOPIC, 1, 0, b"x1", 13, transaction=XA),
    "V28": write_put(TOPIC, BROKER_CHOOSES, 0, b"hello", 20),
    "V34": write_put(TOPIC, 0, 0, b"t1", 26, transaction="TX:S1:1", old=True),
}


def contents(messages: list[Message]) -> list[Content]:
    return [(message.id, message.flag, message.attribute, message.body) for message in messages]


def test_every_vector_of_the_wire_is_used() -> None:
    tested = COMMANDS.keys() | RESULTS.keys() | RECORDS.keys() | VALUES.keys()
    assert tested == VECTORS.keys()
    assert {name.removesuffix("r") for name in VECTORS} == {f"V{number:02}" for number in range(1, 36)}


@pytest.mark.parametrize("name", COMMANDS)
def test_requests_are_understood(name: str) -> None:
    """MQ-058, MQ-059, MQ-060, MQ-063, MQ-064, MQ-109, MQ-110: each request, in any slices, is the command that Java means."""
    for way, pieces in slicings(VECTORS[name], seed=0):
        assert feed(CommandReader(TextLimits()).receive, pieces) == COMMANDS[name], way


@pytest.mark.parametrize("name", WRITTEN)
def test_requests_are_written_byte_for_byte(name: str) -> None:
    """MQ-059, MQ-060, MQ-063, MQ-064, MQ-110: our client sends what the Java client sends."""
    assert WRITTEN[name] == VECTORS[name]


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_written_and_read(name: str) -> None:
    """MQ-058, MQ-062: a result is written byte for byte, and our client reads it in any slices."""
    code, opaque, text = RESULTS[name]
    assert write_result(code, text, opaque) == VECTORS[name]
    for way, pieces in slicings(VECTORS[name], seed=0):
        assert feed(ReplyReader().receive, pieces) == [Reply(code, int(opaque), text.encode())], way


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("word", [b"value", b"data"])
def test_values_are_read(name: str, word: bytes) -> None:
    """MQ-061: `value`, and `data` as the 1.3 manual says, are read in any slices; a cut message at the end is left out."""
    opaque, expected = VALUES[name]
    line = VECTORS[name].partition(b"\r\n")[0] + b"\r\n"
    records = VECTORS[name].removeprefix(line)
    assert write_value_head(len(records), opaque) == line
    for way, pieces in slicings(VECTORS[name].replace(b"value", word, 1), seed=0):
        assert feed(ReplyReader().receive, pieces) == [Reply(VALUE, int(opaque), records)], way
    messages = list(decode_text_messages(records, 0))
    assert contents(messages) == expected
    assert [message.position for message in messages] == [0, 25, 56][: len(messages)]
    assert messages[-1].next_position == {"V10": 76, "V11": 25}[name]


@pytest.mark.parametrize("name", RECORDS)
def test_messages_are_encoded_byte_for_byte(name: str) -> None:
    """MQ-010, MQ-011, MQ-012: the record of a message becomes the bytes that Java readers expect."""
    message_id, flag, attribute, payload = RECORDS[name]
    log_offset = message_id & ((1 << 47) - 1)
    properties = b"" if attribute is None else encode_properties([(TAGS, attribute)])
    record = stored_record(TOPIC, payload, body_crc(payload), flag=flag, log_offset=log_offset, properties=properties)
    assert text_form(TOPIC, record, message_id - log_offset, log_offset) == VECTORS[name]


@pytest.mark.parametrize("name", RECORDS)
def test_messages_are_decoded(name: str) -> None:
    """MQ-010, MQ-011, MQ-012: and back."""
    data = VECTORS[name]
    end = TextPosition(1000 + len(data))
    assert list(decode_text_messages(data, 1000)) == [Message(*RECORDS[name], TextPosition(1000), end)]


def test_a_put_with_attribute_is_split_and_joined() -> None:
    """MQ-012: the body of V05 is attribute and payload."""
    assert split_attribute(1, COLOR) == ("color", b"hi")
    assert join_attribute("color", b"hi") == (1, COLOR)


def test_a_checksum_that_keeps_the_top_bit_is_refused() -> None:
    """MQ-110: the checksum of V08 is the CRC without its top bit, nothing else."""
    data = bytearray(VECTORS["V08"])
    data[4] |= 0x80
    with pytest.raises(CorruptRecord, match="position 0 does not have its checksum"):
        list(decode_text_messages(bytes(data), 0))


def test_two_puts_in_one_segment() -> None:
    """MQ-057, MQ-058: V01 and V02 together, split anywhere, are two commands with the same opaque."""
    both = VECTORS["V01"] + VECTORS["V02"]
    for cut in range(1, len(both)):
        assert feed(CommandReader(TextLimits()).receive, [both[:cut], both[cut:]]) == COMMANDS["V01"] + COMMANDS["V02"]
