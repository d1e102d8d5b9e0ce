"""``metaq debug-bundle``: one file with all that helps to find out why a broker misbehaves."""

import importlib.metadata
import io
import os
import platform
import re
import shutil
import socket
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Final

import click

from metaq import TextClient, __version__
from metaq.address import Address
from metaq.cli.admin import CONFIG, parse_config
from metaq.cli.common import FAILED, broker_option, connect_text, examples
from metaq.errors import ConfigError, MetaqError, Refused
from metaq.form import FORM
from metaq.reasons import reason_of

LOG_BYTES: Final = 1 << 20
"""Limit of a log file; its end is taken."""
ITEMS: Final = ("", "topics", "offsets", "realtime", "stacks")
"""Items of ``stats``; the first one is the broker itself."""
DEPENDENCIES: Final = (
    "click",
    "crcmod",
    "gevent",
    "greenlet",
    "kazoo",
    "orjson",
    "pyyaml",
    "rich",
    "rocksdict",
    "zlib-ng",
)
HIDDEN: Final = "(hidden)"
_TELLING: Final = "pass(?:word|wd|phrase)?|secret|token|credential|api_?key|authorization|signature"
_QUOTED: Final = r""""(?:\\.|[^"\\])*"|'(?:[^']|'')*'"""
# after = a value ends with its word, after : with its line
_ASSIGNED: Final = re.compile(rf"""(?i)([\w.-]*(?:{_TELLING})[\w.-]*["']?\s*(?:=\s*|:\s*))({_QUOTED}|(?<==)\S+|[^\n]+)""")
_BLOCK: Final = re.compile(rf"""(?i)[\w.-]*(?:{_TELLING})[\w.-]*["']?\s*:(?=\s+(?:[!&]\S+\s+)*[|>][-+\d]*\s*(?:#.*)?$)""")
_LOGIN: Final = re.compile(r"(?i)(\bauth\s+\S+\s+)\S+")
_IN_URL: Final = re.compile(r"(?<=://)[^\s/@]+:[^\s/@]+(?=@)")
_PEM: Final = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)

Part = tuple[str, Callable[[], str]]
"""The name of a file in the bundle, and a function that makes its text."""


def redact(text: str) -> str:
    """Return the text without what looks like a secret: values of telling names, logins, users in addresses, private keys."""
    text = _LOGIN.sub(rf"\g<1>{HIDDEN}", _without_blocks(_PEM.sub(HIDDEN, text)))
    return _IN_URL.sub(HIDDEN, _ASSIGNED.sub(rf"\g<1>{HIDDEN}", text))


def _without_blocks(text: str) -> str:
    """Remove YAML block scalars with a telling name: they are the lines after it that are indented more deeply."""
    kept: list[str] = []
    column: int | None = None  # of the name whose block this is
    for line in text.split("\n"):
        stripped = line.lstrip()
        if column is not None and (not stripped or len(line) - len(stripped) > column):
            continue
        found = _BLOCK.search(line)
        column = None if found is None else len(line) - len(line.lstrip(" \t-"))  # a list's item begins after its dash
        kept.append(line if found is None else f"{line[: found.end()]} {HIDDEN}")
    return "\n".join(kept)


@click.command(
    "debug-bundle", epilog=examples("metaq debug-bundle --log /var/log/metaq.log", "metaq debug-bundle --out - | tar tz")
)
@broker_option
@click.option("--data", type=click.Path(path_type=Path), metavar="DIR", help="The data folder, if the broker does not answer.")
@click.option("--log", type=click.Path(path_type=Path), metavar="FILE", help="The broker's log; its last MB is included.")
@click.option(
    "--out", type=click.Path(), metavar="FILE", help="The file to write; - is standard output.  [default: named by the time]"
)
def debug_bundle(broker: Address, data: Path | None, log: Path | None, out: str | None) -> int:
    """Collect facts for a bug report into a tar.gz: settings, statistics, stacks, versions, disk use, log lines.

    It has no message bodies and no passwords: anything that looks like a secret is hidden. Still, check the file before you
    send it to anybody. problems.txt lists what could not be collected. The exit code is 1 if nothing of the broker could be.
    """
    at = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    name = f"metaq-debug-{at}"
    parts: list[Part] = [("versions.txt", _versions)]
    problems: list[str] = []
    folder, reached = data, False
    try:
        with connect_text(broker) as client:
            parts += _asked(client, problems)
            folder = folder or _folder_here(client, broker.host, problems)
        reached = True
    except MetaqError as error:
        problems.append(f"broker: {error}")
    if folder is not None:
        parts.append(("disk.txt", partial(_disk, folder)))
    if log is not None:
        parts.append(("log.txt", partial(_end_of, log)))
    target = f"{name}.tar.gz" if out is None else out
    with _opened(target) as stream, tarfile.open(fileobj=stream, mode="w:gz") as bundle:
        for file, make in parts:
            try:
                _add(bundle, f"{name}/{file}", make())
            except OSError as error:
                where = f": {error.filename}" if error.filename else ""
                problems.append(f"{file}: {reason_of(error)}{where}")
        _add(bundle, f"{name}/problems.txt", "".join(f"{problem}\n" for problem in problems))
    for problem in problems:
        click.echo(f"not collected: {problem}", err=True)
    if target != "-":
        click.echo(target)
    return 0 if reached else FAILED


@contextmanager
def _opened(target: str) -> Iterator[IO[bytes]]:
    """Open the output. Only its owner may read the file, as hiding secrets by their look is a guess."""
    if target == "-":
        with click.open_file(target, "wb") as stream:
            yield stream
        return
    try:
        number = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise ConfigError(f"--out {target}: cannot be written: {reason_of(error)}; give the name of a file") from error
    with open(number, "wb") as stream:
        os.fchmod(number, 0o600)  # the file may have existed with another mode
        yield stream


def _is_here(host: str) -> bool:
    """Return whether an address is one of this machine: no other address can be bound."""
    for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
        except OSError:  # another machine's, or of a family that this machine lacks
            continue
        return True
    return False


def _add(bundle: tarfile.TarFile, name: str, text: str) -> None:
    content = redact(text).encode(errors="replace")
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
    bundle.addfile(entry, io.BytesIO(content))


def _asked(client: TextClient, problems: list[str]) -> list[Part]:
    """Ask the broker now, while it answers. Items that it refuses to this user go to ``problems``."""
    texts = {}
    for item in ITEMS:
        try:
            texts[f"stats{'-' if item else ''}{item}.txt"] = client.stats(item)
        except Refused as error:
            problems.append(f"stats {item}: {error}")
    texts["settings.ini"] = client.stats(CONFIG)
    texts["broker-version.txt"] = client.version() + "\n"
    return [(file, partial(str, text)) for file, text in texts.items()]


def _folder_here(client: TextClient, host: str, problems: list[str]) -> Path | None:
    """Return the data folder of the broker, unless it cannot be found from here: ``problems`` gets the reason."""
    folder = Path(str(parse_config(client.stats(CONFIG))["metaq"]["data"]))
    if not _is_here(host):
        problems.append(f"disk.txt: {host} is another machine, and so is its folder {folder}; run this command there")
    elif not folder.is_absolute():
        problems.append(f"disk.txt: {folder} is relative to the folder in which the broker was started; give --data DIR")
    else:
        return folder
    return None


def _versions() -> str:
    return "".join(f"{line}\n" for line in _version_lines())


def _version_lines() -> Iterator[str]:
    yield f"metaq {__version__} ({FORM})"
    yield f"python {sys.version}"
    yield f"platform {platform.platform()}"
    yield f"processors {os.cpu_count()}"
    for name in DEPENDENCIES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{name} not installed"


def _disk(folder: Path) -> str:
    usage = shutil.disk_usage(folder)
    lines = [f"disk total={usage.total} used={usage.used} free={usage.free}"]
    for place, _, files in sorted(os.walk(folder)):
        found = [_status(Path(place) / file) for file in files]
        sizes = [status.st_size for status in found if status is not None]
        blocks = sum(status.st_blocks * 512 for status in found if status is not None)
        lines.append(f"folder path={place} files={len(sizes)} bytes={sum(sizes)} on_disk={blocks}")
    return "\n".join(lines) + "\n"


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:  # deleted since it was listed
        return None


def _end_of(log: Path) -> str:
    with log.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - LOG_BYTES))
        text = stream.read().decode(errors="replace")
    return text.partition("\n")[2] if size > LOG_BYTES else text  # from the first whole line on
