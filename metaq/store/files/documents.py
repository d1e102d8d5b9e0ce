"""Documents: small JSON files that carry their own checksum and keep their previous version.

A file is ``{"crc32c":"9a3f01cc",`` and then the rest of one JSON object. The checksum (CRC-32C) covers all bytes after those
21. Each write keeps the previous version as ``NAME.bak``; a reader takes that when the file is missing, torn, altered or in a
sector that cannot be read.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import orjson

from metaq.checksum import crc32c
from metaq.errors import CorruptRecord, ReadFailed
from metaq.store.files.disk import Disk, replace_file

_PREFIX: Final = b'{"crc32c":"%08x",'
_PREFIX_SIZE: Final = 21
assert len(_PREFIX % 0) == _PREFIX_SIZE

BACKUP: Final = ".bak"


def encode_document(content: dict[str, Any]) -> bytes:
    """Return the bytes of the file for ``content``, which has at least one member."""
    rest = orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE)[1:]
    return _PREFIX % crc32c(rest) + rest


def decode_document(data: bytes, path: Path) -> dict[str, Any]:
    """Return the content of a document. Raises ``CorruptRecord`` when the checksum does not match."""
    if not has_right_checksum(data):
        raise CorruptRecord(f"{path}: the checksum does not match the {len(data)} bytes")
    document: dict[str, Any] = orjson.loads(data)
    del document["crc32c"]
    return document


def has_right_checksum(data: bytes) -> bool:
    """Return whether the checksum of a document matches its bytes."""
    rest = data[_PREFIX_SIZE:]
    return len(rest) >= 2 and data[:_PREFIX_SIZE] == _PREFIX % crc32c(rest)


def write_document(disk: Disk, path: Path, content: dict[str, Any]) -> None:
    """Make ``content`` the durable content of ``path``; a crash leaves this version or the previous one."""
    try:
        current = disk.read_file(path)
    except (FileNotFoundError, ReadFailed):
        current = b""
    if has_right_checksum(current):  # otherwise the existing backup is worth more, and stays
        replace_file(disk, path.with_name(path.name + BACKUP), current)
    replace_file(disk, path, encode_document(content))


def _any(content: dict[str, Any]) -> bool:
    """Accept every intact version."""
    return True


def read_document(
    disk: Disk, path: Path, counts: Callable[[dict[str, Any]], bool] = _any
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the newest intact version that ``counts``, or ``None``, and what was wrong with versions that are not intact."""
    problems: list[str] = []
    for candidate in (path, path.with_name(path.name + BACKUP)):
        try:
            content = decode_document(disk.read_file(candidate), candidate)
        except FileNotFoundError:
            continue
        except (CorruptRecord, ReadFailed) as error:
            problems.append(str(error))
        else:
            if counts(content):
                return content, problems
    return None, problems
