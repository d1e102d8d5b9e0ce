"""The files that pages need: styles, scripts, pictures. Their addresses hold digests, so that browsers keep them for ever."""

import hashlib
from pathlib import Path
from typing import Final, NamedTuple

from metaq.server.console.visit import ROOT

FOLDER: Final = Path(__file__).parent / "static"
TYPES: Final = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
"""By suffix; other files there are licences, and not served."""
_DIGITS: Final = 16


class Asset(NamedTuple):
    """One file."""

    digest: str
    content_type: str
    data: bytes


class Assets:
    """All of them, read once."""

    def __init__(self) -> None:
        self._by_name = {path.name: _read(path) for path in FOLDER.iterdir() if path.suffix in TYPES}

    def find(self, name: str, digest: str) -> Asset | None:
        """Return a file, or ``None`` when there is none with this name and digest."""
        asset = self._by_name.get(name)
        return asset if asset is not None and asset.digest == digest else None

    def address(self, name: str) -> str:
        """Return the address of a file. Raise ``KeyError`` when there is none."""
        return f"{ROOT}/static/{self._by_name[name].digest}/{name}"


def _read(path: Path) -> Asset:
    data = path.read_bytes()
    return Asset(hashlib.sha256(data).hexdigest()[:_DIGITS], TYPES[path.suffix], data)
