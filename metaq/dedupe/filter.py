"""A filter of ids: it says of an id that it is surely not among those of a generation, and never waits.

It is a Bloom filter in *layers*, since nobody knows how many ids a generation will get: a full layer is followed by a larger
one. A layer is cut into blocks of 64 bytes, the line of a processor's cache. An id has five bits in one block of its layer.
With 24 bits for each id a full layer takes 1 id in 2,000 for its own that is not.

The bits follow from ``hash``. Its secret is another one in each process, unless PYTHONHASHSEED is set: so nobody can choose ids
that meet.
"""

from typing import Final

from librt.strings import BytesWriter

FIRST_BYTES: Final = 4096
"""The size of the first layer, for 1,365 ids."""
GROWTH: Final = 16
LARGEST_BYTES: Final = 8 << 20
"""The size of the largest layers: to make one stops the loop for 3 ms."""
MOST_LAYERS: Final = 7
"""So a filter knows 11.5 million ids, with 33 MiB of memory. Beyond them it says nothing any more."""
BYTES_EACH: Final = 3
_BLOCK_BITS: Final = 6
"""The bits of a byte's place in its block."""
_PLACES: Final = 5
_BLOCK_AT: Final = 9 * _PLACES
"""The bit of a spot where the number of its block begins, above the places of its bits in the block."""
_SPOT: Final = (1 << 62) - 1
"""The bits of a hash that are used: as many as a compiled module holds without an object."""


def spot_of(name: bytes) -> int:
    """Return what a filter takes for a name: the same for equal names, in this process."""
    return hash(name) & _SPOT


class Layer:
    """A part of a filter, of a fixed size."""

    def __init__(self, size: int) -> None:
        """Make one of so many bytes, a power of two."""
        self.size = size
        self.room = size // BYTES_EACH
        """As many ids more may be added."""
        self._bits = BytesWriter()
        self._bits.write(bytes(size))
        self._mask = (size >> _BLOCK_BITS) - 1

    def has(self, spot: int) -> bool:
        """Return false when an id was certainly not added."""
        bits, block = self._bits, (spot >> _BLOCK_AT & self._mask) << _BLOCK_BITS
        for _ in range(_PLACES):
            byte: int = bits[block + (spot >> 3 & 63)]
            if not byte >> (spot & 7) & 1:
                return False
            spot >>= 9
        return True

    def add(self, spot: int) -> None:
        """Add an id."""
        bits, block = self._bits, (spot >> _BLOCK_AT & self._mask) << _BLOCK_BITS
        for _ in range(_PLACES):
            at = block + (spot >> 3 & 63)
            byte: int = bits[at]
            bits[at] = byte | 1 << (spot & 7)
            spot >>= 9
        self.room -= 1


class IdFilter:
    """The filter of one generation. An id is given by its ``spot_of``."""

    def __init__(self, most_layers: int = MOST_LAYERS) -> None:
        self._layers: list[Layer] = []
        self._most_layers = most_layers
        self._is_full = False

    def has(self, spot: int) -> bool:
        """Return false when an id was certainly never met."""
        for layer in self._layers:
            if layer.has(spot):
                return True
        return self._is_full

    def meet(self, spot: int) -> bool:
        """Return false when an id was certainly never met before; it is met now."""
        if self.has(spot):
            return True
        layers = self._layers
        if not layers or not layers[-1].room:
            if len(layers) == self._most_layers:
                self._is_full = True
                return False
            layers.append(Layer(min(LARGEST_BYTES, layers[-1].size * GROWTH) if layers else FIRST_BYTES))
        layers[-1].add(spot)
        return False
