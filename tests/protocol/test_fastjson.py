"""JSON with keys that are not strings: the forms that real brokers and clients write, round trips, and garbage."""

import json
import random
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from metaq.errors import BadRequest
from metaq.message import MessageQueue
from metaq.protocol.remoting.fastjson import MAX_LENIENT_BYTES, MAX_NESTING, decode, encode

QUEUE: Final = MessageQueue("TopicA", "broker-a", 3)
OBJECT: Final = '{"brokerName":"broker-a","queueId":3,"topic":"TopicA"}'

characters = st.characters(exclude_categories=["Cs"])
texts = st.text(characters, max_size=12)
integers = st.integers(-(1 << 63), (1 << 64) - 1)
leaves = st.none() | st.booleans() | integers | st.floats(allow_nan=False, allow_infinity=False) | texts
queues = st.builds(MessageQueue, texts, texts, st.integers(-(1 << 31), (1 << 31) - 1))


def nested(keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4)

    return st.recursive(leaves, around, max_leaves=20)


values = nested(texts | integers | queues)
plain_values = nested(texts)


# -- the forms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":[1,-2.5,"x",true,false,null]}', {"a": [1, -2.5, "x", True, False, None]}),
        (
            '{"offsetTable":{' + OBJECT + ':{"maxOffset":1,"minOffset":0}}}',
            {"offsetTable": {QUEUE: {"maxOffset": 1, "minOffset": 0}}},
        ),
        ('{"offsetTable":{' + json.dumps(OBJECT) + ":12}}", {"offsetTable": {QUEUE: 12}}),
        ('{ { "topic" : "TopicA", "queueId":3,\n"brokerName":"broker-a" } : 1 }', {QUEUE: 1}),
        ('{"offsetTable":{"TopicA@CG_A":{0:5,1:7}}}', {"offsetTable": {"TopicA@CG_A": {0: 5, 1: 7}}}),
        ('{"offsetTable":{1:4,3:5}}', {"offsetTable": {1: 4, 3: 5}}),
        ('{"brokerAddrs":{0:"10.0.0.1:10911",1:"b"}}', {"brokerAddrs": {0: "10.0.0.1:10911", 1: "b"}}),
        ('{"brokerAddrs":{"0":"10.0.0.1:10911"}}', {"brokerAddrs": {"0": "10.0.0.1:10911"}}),
        ("{-1:{}, 2 : []}", {-1: {}, 2: []}),
        ("{}", {}),
        ("[]", []),
        (" [ 1 , 2 ] ", [1, 2]),
        ("{1:1795257375351123456}", {1: 1795257375351123456}),
        ("{1:18446744073709551616}", {1: 18446744073709551616.0}),
        ("{1:1e2,2:-0.5E-1}", {1: 100.0, 2: -0.05}),
        (r'{1:"\"\\\/\b\f\n\r\t\u00e9中\ud83d\ude00\uD83D\uDE00"}', {1: '"\\/\b\f\n\r\té中😀😀'}),
        (r'{1:"a\u0001b\u0002"}', {1: "a\x01b\x02"}),
        ('{1:"a\x01b"}', {1: "a\x01b"}),
        ('{"{not an object":1}', {"{not an object": 1}),
        ('{"{\\"a\\":1}":1}', {'{"a":1}': 1}),
        ('{"{\\"topic\\":{\\"x\\":1}}":1}', {'{"topic":{"x":1}}': 1}),
        ('{1:1,1:2,"a":3,"a":4}', {1: 2, "a": 4}),
        ('["{","{}"]', ["{", "{}"]),
    ],
)
def test_a_form_is_read(text: str, expected: object) -> None:
    """SG-068: plain JSON, and the keys that are none of plain JSON."""
    found = decode(text.encode())
    assert found == expected
    assert repr(found) == repr(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"offsetTable": {QUEUE: 12}}, '{"offsetTable":{' + OBJECT + ":12}}"),
        ({"offsetTable": {"TopicA@CG_A": {0: 5, 1: 7}}}, '{"offsetTable":{"TopicA@CG_A":{0:5,1:7}}}'),
        ({"mqSet": [QUEUE]}, '{"mqSet":[' + OBJECT + "]}"),
        ({"x": [{1: QUEUE}]}, '{"x":[{1:' + OBJECT + "}]}"),
        ({"0": "中", "b": [1.0, None, True]}, '{"0":"中","b":[1.0,null,true]}'),
        ({-1: {}}, "{-1:{}}"),
    ],
)
def test_a_form_is_written(value: object, text: str) -> None:
    """SG-068: keys as fastjson writes them, and no blanks, which one client does not bear."""
    assert encode(value) == text.encode()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "character 1: expected a value, not the end"),
        ("{", "expected a key: a text, a whole number or a message queue, not the end"),
        ("{1:2", "expected ',', not the end"),
        ("{1:2,}", "character 6: expected a key"),
        ("{1 2}", "expected ':', not '2}'"),
        ("{1.5:2}", "character 2: expected a key"),
        ("{99999999999999999999:2}", "expected a key"),
        ("{true:2}", "expected a key"),
        ("{a:2}", "expected a key"),
        ("{[1]:2}", "expected a key"),
        ('{{"a":1}:2}', "character 2: expected a message queue"),
        ('{{"topic":"t","brokerName":"b","queueId":"0"}:2}', "expected a message queue"),
        ('{{"topic":"t","brokerName":"b","queueId":true}:2}', "expected a message queue"),
        ("{1:[1,]}", "expected a value, not ']}'"),
        ("{1:01}", "expected ',', not '1}'"),
        ("{1:+1}", "expected a value"),
        ("{1:NaN}", "expected a value"),
        ("{1:1e999}", "range of a double"),
        ('{1:"x}', "a text with a closing quote"),
        (r'{1:"\x"}', r"without the escape \\x"),
        (r'{1:"\u12"}', r"without the escape \\u"),
        (r'{1:"\ud83d"}', "half a character"),
        (r'{1:"\ude00"}', "half a character"),
        (r'{1:"\u0041\ude00"}', "half a character"),
        ("{1:1} x", "expected the end, not 'x'"),
        ("{1:" + "[" * MAX_NESTING, f"no deeper than the limit of {MAX_NESTING}"),
        ("{" * 50_000, f"no deeper than the limit of {MAX_NESTING}"),
        ("[" * 50_000, f"no deeper than the limit of {MAX_NESTING}"),
    ],
)
def test_garbage_is_refused_with_place_and_reason(text: str, reason: str) -> None:
    """Whatever a peer sends; the connection goes on."""
    with pytest.raises(BadRequest, match=reason):
        decode(text.encode())


def test_bytes_that_are_no_text_and_bodies_over_the_limit_are_refused() -> None:
    """And the limit does not hold for plain JSON."""
    with pytest.raises(BadRequest, match="byte 4: not UTF-8"):
        decode(b"{1:\xff}")
    long = b'["%b"]' % (b"a" * MAX_LENIENT_BYTES)
    assert decode(long) == ["a" * MAX_LENIENT_BYTES]
    with pytest.raises(BadRequest, match=f"over the limit of {MAX_LENIENT_BYTES}"):
        decode(b"{1:%b}" % long)


def test_the_deepest_nesting_is_read() -> None:
    """So that the limit is where the error says it is."""
    text = "{1:" + "[" * (MAX_NESTING - 1) + "]" * (MAX_NESTING - 1) + "}"
    value = decode(text.encode())[1]
    for _ in range(MAX_NESTING - 2):
        (value,) = value
    assert value == []


@pytest.mark.parametrize("value", [{1.5: 1}, {True: 1}, {"a": {1, 2}}, {1: object()}, {(1, 2): 3}])
def test_what_json_cannot_hold_is_an_error_of_the_program(value: object) -> None:
    """Never a text that nobody can read."""
    with pytest.raises(TypeError):
        encode(value)


# -- laws -------------------------------------------------------------------------------------------------------------


@given(values)
@example({QUEUE: {0: [QUEUE._asdict()]}})
def test_values_round_trip(value: object) -> None:
    """SG-068: what is written is read."""
    assert decode(encode(value)) == value


@given(plain_values, st.booleans(), st.sampled_from([None, 1]))
def test_both_parsers_agree_on_plain_json(value: object, ascii_only: bool, indent: int | None) -> None:
    """The parser for other keys reads everything else like the parser of plain JSON."""
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert decode(text.encode()) == value
    assert decode(b"{0:%b}" % text.encode()) == {0: value}


def mutated(data: bytes, seed: int) -> bytes:
    chance = random.Random(seed)
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(out) + 1)
        match chance.randrange(3):
            case 0:
                out[at : at + 1] = bytes((chance.choice(b'{}[]":,\\0u-e\x00\xff'),))
            case 1:
                del out[at : at + chance.randint(1, 5)]
            case _:
                out[at:at] = out[: chance.randint(0, 20)]
    return bytes(out)


@given(values, st.integers(0, 1 << 32))
def test_mutated_bodies_are_read_or_refused(value: object, seed: int) -> None:
    """No other error."""
    data = mutated(encode(value), seed)
    try:
        again = decode(data)
    except BadRequest as error:
        assert str(error).startswith("JSON body"), data
    else:
        assert decode(encode(again)) == again, data


@given(st.binary(max_size=60) | st.text('{}[]":,\\u0123456789-.eE tnrlfas', max_size=60).map(str.encode))
def test_random_bytes_are_read_or_refused(data: bytes) -> None:
    """No other error."""
    try:
        decode(data)
    except BadRequest as error:
        assert str(error).startswith("JSON body"), data
