"""Secrets that `metaq debug-bundle` must not show, and facts that it must not look at on the wrong machine."""

import tarfile
from pathlib import Path

import pytest

from metaq.cli.doctor.bundle import _is_here, redact
from tests.support.broker import BrokerProcess
from tests.support.cli import Cli


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('command="auth root hunter2 1" peer=x', 'command="auth root (hidden) 1" peer=x'),
        ("password: correct horse battery", "password: (hidden)"),
        ('password: "a\\"b c"', "password: (hidden)"),
        ("secret: 'it''s'\nadmin: true", "secret: (hidden)\nadmin: true"),
        ("password:\n  correct horse", "password:\n  (hidden)"),
        ("password: |\n  correct horse\n  battery\nadmin: true", "password: (hidden)\nadmin: true"),
        ("password=abc next=1", "password=(hidden) next=1"),
        ("author of it", "author of it"),
    ],
)
def test_what_is_hidden(text: str, expected: str) -> None:
    """E-31: logins in log lines, and values with blanks to their end."""
    assert redact(text) == expected


def test_a_bundle_is_for_its_owner_only(tmp_path: Path) -> None:
    """E-31: also where the file was there before, for everybody."""
    for old in (True, False):
        file = tmp_path / f"{old}.tar.gz"
        if old:
            file.touch()
            file.chmod(0o644)
        Cli("").run("debug-bundle", "--broker", "127.0.0.1:1", "--out", str(file), code=1)
        assert file.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_this_machine_does_not_have_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-31: a relative one is relative to where the broker was started; one of another machine is there. Both are said."""
    file = tmp_path / "bundle.tar.gz"
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    with BrokerProcess(Path("data")) as broker:
        Cli("").run("debug-bundle", "--broker", broker.address, "--out", str(file))
        assert "disk.txt: data is relative to the folder in which the broker was started; give --data DIR" in problems(file)
        Cli("").run("debug-bundle", "--broker", broker.address, "--data", str(tmp_path / "data"), "--out", str(file))
        assert problems(file) == ""
    with BrokerProcess(tmp_path / "data") as broker:
        assert _is_here("127.0.0.1") and _is_here("localhost") and not _is_here("192.0.2.1")
        monkeypatch.setattr("metaq.cli.doctor.bundle._is_here", lambda host: False)
        Cli("").run("debug-bundle", "--broker", broker.address, "--out", str(file))
        assert f"disk.txt: 127.0.0.1 is another machine, and so is its folder {tmp_path / 'data'}" in problems(file)


def problems(file: Path) -> str:
    """Return the text of problems.txt; check that the bundle has a disk.txt exactly where that text is empty."""
    with tarfile.open(file) as archive:
        names = {Path(name).name: name for name in archive.getnames()}
        stream = archive.extractfile(names["problems.txt"])
        assert stream is not None
        text = stream.read().decode()
    assert ("disk.txt" in names) == (text == "")
    return text
