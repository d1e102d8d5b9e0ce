"""Batches are stored whole or not at all, and cannot be made to grow."""

from pathlib import Path
from typing import Final

from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import encode_header, with_letters
from metaq.protocol.remoting.sending.batch import BatchItem, encode_batch
from tests.support.admin import connect
from tests.support.broker import BrokerProcess
from tests.support.messages import records, send, send_header, sent
from tests.support.remoting import RemotingClient

SMALL: Final = ("--segment-bytes", "65536", "--max-body-bytes", "4096", "--sweep-interval-ms", "3600000")


class Cramped(BrokerProcess):
    """A broker that a test can take the room from."""

    program = ("tests.support.nospace",)


def send_batch(client: RemotingClient, bodies: list[bytes], pairs: str = "") -> RemotingCommand:
    fields = with_letters(encode_header(send_header("T", pairs)._replace(batch=True)))
    return client.call(Request.SEND_BATCH_MESSAGE, fields, encode_batch(BatchItem(0, body, "") for body in bodies))


def test_a_batch_without_room_leaves_nothing(tmp_path: Path) -> None:
    """SG-057: the disk is full where its third message would begin a segment; what is sent next is stored."""
    with Cramped(tmp_path / "data", *SMALL) as broker, RemotingClient(broker.host, broker.port) as client:
        for _ in range(5):  # three fill the first segment, two begin the second one
            sent(client, send(client, send_header("T"), bytes(20_000)))
        (tmp_path / "full").touch()
        refused = send_batch(client, [bytes(10_000)] * 3)
        assert refused.code == Response.SERVICE_NOT_AVAILABLE, refused
        assert sent(client, send(client, send_header("T"), b"small"))["queueOffset"] == "5"
        assert len(records(client, "T")) == 6
        (tmp_path / "full").unlink()
        assert send_batch(client, [bytes(10_000)] * 3).fields["queueOffset"] == "6"
        assert len(records(client, "T")) == 9
        assert broker.terminate() == 0


def test_a_batch_whose_messages_share_too_much(tmp_path: Path) -> None:
    """SG-057: the properties of the batch are stored with each of its messages, so few bytes could become very many."""
    with BrokerProcess(tmp_path / "data", "--max-message-bytes", "65536") as broker, connect(broker) as client:
        refused = send_batch(client, [b"x"] * 1000, f"a\x01{'x' * 30_000}")
        assert (refused.code, "of a batch" in (refused.remark or "")) == (Response.MESSAGE_ILLEGAL, True), refused
        assert send_batch(client, [b"x"] * 8, f"a\x01{'x' * 30_000}").code == Response.SUCCESS
        assert len(records(client, "T")) == 8
