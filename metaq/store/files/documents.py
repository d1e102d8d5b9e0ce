"""Small JSON files that carry their own checksum and keep their previous version.

``{"crc32c":"9a3f01cc",`` followed by the rest of one JSON object. The checksum (CRC-32C) covers all bytes after those 21. Each
write keeps the version before it as ``NAME.bak``; a reader takes that one when the file is missing, torn or altered.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import orjson

from metaq.checksum import crc32c
from metaq.errors import CorruptRecord
from metaq.store.files.disk import Disk, replace_file

_PREFIX: Final = b'{"crc32c":"%08x",'
_PREFIX_SIZE: Final = 21
assert len(_PREFIX % 0) == _PREFIX_SIZE

BACKUP: Final = ".bak"


def encode_document(content: dict[str, Any]) -> bytes:
    """The bytes of the file. ``content`` has at least one member."""
    rest = orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE)[1:]
    return _PREFIX % crc32c(rest) + rest


def decode_document(data: bytes, path: Path) -> dict[str, Any]:
    """The content, or ``CorruptRecord`` when a bit of it is not as written."""
    if not _is_intact(data):
        raise CorruptRecord(f"{path}: the {len(data)} bytes do not have the checksum they begin with")
    document: dict[str, Any] = orjson.loads(data)
    del document["crc32c"]
    return document


def _is_intact(data: bytes) -> bool:
    rest = data[_PREFIX_SIZE:]
    return len(rest) >= 2 and data[:_PREFIX_SIZE] == _PREFIX % crc32c(rest)


def write_document(disk: Disk, path: Path, content: dict[str, Any]) -> None:
    """Make ``content`` the durable content of ``path``; a crash leaves this version or the one before."""
    try:
        current = disk.read_file(path)
    except FileNotFoundError:
        current = b""
    if _is_intact(current):  # else nothing is worth keeping: an existing backup stays
        replace_file(disk, path.with_name(path.name + BACKUP), current)
    replace_file(disk, path, encode_document(content))


def _any(content: dict[str, Any]) -> bool:
    """Every intact version counts."""
    return True


def read_document(
    disk: Disk, path: Path, counts: Callable[[dict[str, Any]], bool] = _any
) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest intact version that counts, ``None`` when there is none, and what was wrong with those that are not intact."""
    problems: list[str] = []
    for candidate in (path, path.with_name(path.name + BACKUP)):
        try:
            content = decode_document(disk.read_file(candidate), candidate)
        except FileNotFoundError:
            continue
        except CorruptRecord as error:
            problems.append(str(error))
        else:
            if counts(content):
                return content, problems
    return None, problems
