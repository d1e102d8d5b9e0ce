"""The filter of ids: what was met is always found, and of what was not only a little."""

from typing import Final

from metaq.dedupe.filter import BYTES_EACH, FIRST_BYTES, GROWTH, IdFilter, Layer, spot_of

FIRST_IDS: Final = FIRST_BYTES // BYTES_EACH
COUNT: Final = FIRST_IDS * (1 + GROWTH) + 100


def spot(number: int) -> int:
    return spot_of(b"orders\0%d" % number)


def test_a_filter_grows_by_layers_and_finds_all() -> None:
    """D-1: through two full layers and into the third; of other ids it takes less than 1 in 200 for its own."""
    ids = IdFilter()
    assert not ids.has(spot(0))
    assert sum(ids.meet(spot(number)) for number in range(COUNT)) < COUNT / 200
    assert all(ids.meet(spot(number)) and ids.has(spot(number)) for number in range(COUNT))
    assert sum(ids.has(spot(number)) for number in range(COUNT, 2 * COUNT)) < COUNT / 200


def test_a_full_layer_is_mostly_right() -> None:
    """1 in 2,000, as the module says."""
    layer = Layer(FIRST_BYTES)
    for number in range(FIRST_IDS):
        layer.add(spot(number))
    assert not layer.room
    assert sum(layer.has(spot(number)) for number in range(FIRST_IDS, 61 * FIRST_IDS)) < 60 * FIRST_IDS / 1000


def test_a_full_filter_says_nothing() -> None:
    """D-1: beyond its bound every id may be there, so that the index is asked."""
    ids = IdFilter(most_layers=1)
    for number in range(2 * FIRST_IDS):
        ids.meet(spot(number))
    assert all(ids.has(spot(number)) for number in range(4 * FIRST_IDS))
