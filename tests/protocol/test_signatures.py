"""Signatures of requests, against those of the real tools."""

import pytest

from metaq.protocol.remoting.signature import ACCESS_KEY, SIGNATURE, Credentials, is_signed_with, sign

SECRET = "12345678"
NINE = {
    "topic": "TopicA",
    "defaultTopic": "TBW102",
    "readQueueNums": "8",
    "writeQueueNums": "4",
    "perm": "6",
    "topicFilterType": "SINGLE_TAG",
    "topicSysFlag": "0",
    "order": "false",
}


@pytest.mark.parametrize(
    ("fields", "body", "expected"),
    [
        ({}, b"", "Ou1T58RIcyZWaTIwzkhJZWn/Zvs="),
        ({"topic": "TopicA"}, b"", "yvZvKMqXR7E4uBCgkiiGE2OZ9Zg="),
        ({}, b"flushDiskType=ASYNC_FLUSH\n", "6GuKLBL1Zj0cQNzsOLATS2mz4xo="),
    ],
    ids=["G28", "G29", "G30"],
)
def test_golden_signatures(fields: dict[str, str], body: bytes, expected: str) -> None:
    """E-05, RD-020: G28 to G30, sent by the real mqadmin."""
    signed = Credentials("rocketmq2", SECRET).signed(fields, body)
    assert signed == {**fields, ACCESS_KEY: "rocketmq2", SIGNATURE: expected}
    assert is_signed_with(SECRET, signed, body)


def test_what_is_signed() -> None:
    """E-05: a token is, the flag that Java clients add later is not; every other change is noticed."""
    signed = Credentials("rocketmq2", SECRET).signed({"topic": "é", "SecurityToken": "token"}, b"\xff")
    assert is_signed_with(SECRET, {**signed, "_UNIQUE_KEY_QUERY": "true"}, b"\xff")
    assert not is_signed_with(SECRET, {**signed, "SecurityToken": "other"}, b"\xff")
    assert not is_signed_with(SECRET, signed, b"\xfe")
    assert not is_signed_with("12345679", signed, b"\xff")
    assert not is_signed_with(SECRET, {ACCESS_KEY: "rocketmq2"}, b"")


def test_a_signature_is_over_text_as_it_travels() -> None:
    """E-05: fields in the order of their names, upper case first, whatever the order in which they come."""
    values = ("rocketmq2", "TBW102", "false", "6", "8", "TopicA", "SINGLE_TAG", "0", "4")
    assert sign(SECRET, {ACCESS_KEY: "rocketmq2", **NINE}, b"") == sign(SECRET, {"all": "".join(values)}, b"")
    assert sign(SECRET, {"b": "2", "B": "1", "a": "3"}, b"") == sign(SECRET, {"x": "132"}, b"")


def test_a_secret_is_not_shown() -> None:
    """E-05: neither in logs nor in errors."""
    assert SECRET not in f"{Credentials('ann', SECRET)} {Credentials('ann', SECRET)!r}"
