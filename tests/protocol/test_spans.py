"""Spans of ordinals, compared with sets of numbers."""

import random

import pytest

from metaq.errors import BadRequest
from metaq.protocol.remoting.attributes import DISCARDED, TOPIC_ATTRIBUTES, changed, discarding, read_changes
from metaq.protocol.spans import MOST_CHARACTERS, Spans


def test_text_and_back() -> None:
    """ES-033: neighbours stand together, in order."""
    assert str(Spans.of([9, 3, 8, 7], 0)) == "3 7-9"
    assert Spans.read("3 7-9").spans == Spans.of([3, 7, 8, 9], 0).spans
    assert str(Spans.of([9, 3, 7], 7)) == "0-7 9"
    assert str(Spans.read("4-5 1 2-3")) == "1-5"
    assert str(Spans.read("")) == ""


@pytest.mark.parametrize("text", ["a", "1,2", " 1", "1 ", "1--2", "-1", "1  2", "١", "9" * 19, "1 " * MOST_CHARACTERS])
def test_other_texts_are_refused(text: str) -> None:
    """ES-033: nothing that was not written by ``str``, or could have been."""
    with pytest.raises(BadRequest):
        Spans.read(text)


@pytest.mark.parametrize("seed", range(20))
def test_as_sets(seed: int) -> None:
    """ES-033: membership, counts and unions are those of a set."""
    numbers = random.Random(seed)
    spans, kept = Spans(), set[int]()
    for _ in range(30):
        added, begin = {numbers.randrange(60) for _ in range(numbers.randrange(4))}, numbers.randrange(15)
        spans, kept = spans | Spans.of(added, begin), kept | added | set(range(begin))
        assert {ordinal for ordinal in range(-1, 62) if ordinal in spans} == kept
        begin, end = sorted(numbers.sample(range(60), 2))
        assert spans.count(begin, end) == len(kept & set(range(begin, end)))
        assert Spans.read(str(spans)).spans == spans.spans
        assert all(one[1] + 1 < other[0] for one, other in zip(spans.spans, spans.spans[1:], strict=False))


def test_dead_letters_that_are_too_many_spans() -> None:
    """E-09: whoever asks to discard them, and the broker that has discarded others before, say the same."""
    some = Spans.of(range(0, 1000, 2), 0)
    header = discarding("%DLQ%guests", (1, 1), 6, some)
    assert read_changes(header.attributes or "") == {f"+{DISCARDED}": str(some)}
    refusal = "too many dead letters would be discarded one by one: the list of them has [0-9]+ characters"
    with pytest.raises(BadRequest, match=refusal):
        discarding("%DLQ%guests", (1, 1), 6, Spans.of(range(0, 4000, 2), 0))
    more = {f"+{DISCARDED}": str(Spans.of(range(2000, 5000, 4), 0))}
    with pytest.raises(BadRequest, match=refusal):
        changed(TOPIC_ATTRIBUTES, {DISCARDED: str(some)}, more)
