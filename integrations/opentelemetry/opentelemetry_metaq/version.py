"""The version of this package, which spans carry."""

from typing import Final

__version__: Final = "0.1.0"
