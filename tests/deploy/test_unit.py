"""`metaq systemd` with a configuration file: its folder is the unit's, and its path is taken as it is."""

from pathlib import Path

import pytest

from tests.support.cli import Cli


def test_the_folder_is_that_of_the_file(tmp_path: Path) -> None:
    """E-18: else the unit could not write where the broker does, or the broker would not use what the file says."""
    file = tmp_path / "broker.yaml"
    file.write_text("data: /srv/orders\n")
    text = Cli("").text("systemd", "--config", str(file))
    assert f"metaq serve --config {file}\n" in text and "ReadWritePaths=/srv/orders\n" in text
    assert Cli("").text("systemd", "--config", str(file), "--data", "/srv/orders") == text
    said = Cli("").run("systemd", "--config", str(file), "--data", "/srv/other", code=2).stderr
    assert f"data: /srv/other by --data, and /srv/orders in {file}:1; give only one of them" in said
    file.write_text("max_topics: 7\n")
    text = Cli("").text("systemd", "--config", str(file))
    assert f"metaq serve --data /var/lib/metaq --config {file}\n" in text and "StateDirectory=metaq\n" in text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("data: data\n", "data: a unit needs absolute paths"),
        ("data: /srv/my orders\n", "/srv/my orders: a unit needs paths of letters, digits and ./+-_"),
        ("data: /srv/100%\n", "/srv/100%: a unit needs paths"),
        ("daat: /srv\n", "unknown setting 'daat'"),
    ],
)
def test_what_systemd_would_take_for_something_else(tmp_path: Path, text: str, reason: str) -> None:
    """E-18: is refused, as is a file that is not there."""
    file = tmp_path / "broker.yaml"
    file.write_text(text)
    assert reason in Cli("").run("systemd", "--config", str(file), code=2).stderr
    assert "cannot read the configuration file" in Cli("").run("systemd", "--config", str(tmp_path / "none"), code=2).stderr
    odd = tmp_path / "a b.yaml"
    odd.touch()
    assert f"{odd}: a unit needs paths" in Cli("").run("systemd", "--config", str(odd), code=2).stderr
