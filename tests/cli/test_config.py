"""`metaq config`: the values of the settings and their sources, checks of a file, and the page about settings."""

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import yaml

from metaq import TextClient
from metaq.config import FIELDS, load
from tests.docs.examples import ROOT
from tests.support.broker import BrokerProcess
from tests.support.tls import Certificates, issue
from tests.support.users import ADMIN, READER, WRITER, write_users


def config(*arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `metaq config`, with only the given environment, and check its exit code."""
    command = [sys.executable, "-m", "metaq", "config", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_what_is_shown_is_a_file(tmp_path: Path) -> None:
    """E-29: that gives the same settings again."""
    file = tmp_path / "broker.yaml"
    file.write_text("topics: {a: {partitions: 4}}\nadvertise: broker-1:10911\n")
    shown = config("show", "--config", str(file), "--max-groups", "7", METAQ_MAX_TOPICS="8").stdout
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    expected = load(file, {"METAQ_MAX_TOPICS": "8"}, {"max_groups": "7"})
    assert load(again, {}, {}) == expected
    assert list(yaml.safe_load(shown)) == list(FIELDS)


def test_the_origin_of_each_setting_is_shown(tmp_path: Path) -> None:
    """E-29: as text and as JSON, which name the same."""
    file = tmp_path / "broker.yaml"
    file.write_text("# a comment\nmax_topics: 5\nmax_groups: 6\n")
    arguments = ("show", "--origin", "--config", str(file), "--max-body-bytes", "7")
    lines = config(*arguments, METAQ_MAX_GROUPS="8").stdout.splitlines()
    told: dict[str, Any] = json.loads(config(*arguments, "--json", METAQ_MAX_GROUPS="8").stdout)
    expected = {"max_topics": f"{file}:2", "max_groups": "METAQ_MAX_GROUPS", "max_body_bytes": "--max-body-bytes"}
    assert {name: said["origin"] for name, said in told.items() if said["origin"] != "default"} == expected
    assert told["max_groups"]["value"] == 8
    assert [line.partition("  # ")[2].strip() for line in lines] == [told[name]["origin"] for name in FIELDS]


def test_the_settings_of_a_running_broker_are_shown(tmp_path: Path) -> None:
    """E-29: those in force there, whatever this shell's environment says."""
    with BrokerProcess(tmp_path / "data", "--max-topics", "11") as broker:
        shown = yaml.safe_load(config("show", "--running", "--broker", broker.address, METAQ_MAX_TOPICS="12").stdout)
    assert shown["max_topics"] == 11
    assert shown["data"] == str(tmp_path / "data")
    assert (shown["sql_filter"], shown["keep_hours"]) == (True, 72)
    assert shown.keys() == FIELDS.keys() - {"topics"}
    assert "cannot be combined with --origin" in config("show", "--running", "--origin", code=2).stderr


def test_a_name_of_digits_is_shown_as_it_is(tmp_path: Path) -> None:
    """E-29: texts that look like numbers stay texts."""
    with BrokerProcess(tmp_path / "data", "--broker-name", "7") as broker:
        shown = yaml.safe_load(config("show", "--running", "--broker", broker.address).stdout)
    assert shown["broker_name"] == "7"
    assert isinstance(shown["max_topics"], int)


def text_client(broker: BrokerProcess, certificates: Certificates) -> TextClient:
    name, secret = ADMIN
    return TextClient(broker.host, broker.port, user=name, password=secret, tls=str(certificates.authority))


def test_no_secret_is_shown(tmp_path: Path) -> None:
    """E-05, E-29: neither by the broker nor by the command, whoever asks."""
    users, certificates = write_users(tmp_path / "users.yaml"), issue(tmp_path)
    shown: list[str] = []
    with BrokerProcess(tmp_path / "data", "--users-file", str(users), *certificates.flags) as broker:
        access = ("--user", ADMIN.name, "--tls-ca", str(certificates.authority))
        command = [sys.executable, "-m", "metaq", *access, "config", "show", "--running", "--broker", broker.address]
        shown.append(subprocess.run(command, env={"METAQ_PASSWORD": ADMIN.secret}, text=True, stdout=PIPE, check=True).stdout)
        with text_client(broker, certificates) as client:
            shown.append(client.stats("config"))
    flags = ("--users-file", str(users), *certificates.flags)
    shown.append(config("show", "--origin", *flags, METAQ_PASSWORD=ADMIN.secret, METAQ_USER=ADMIN.name).stdout)
    key = certificates.chain.read_text().splitlines()[1]
    for text in shown:
        assert str(users) in text and str(certificates.chain) in text
        assert not [secret for secret in (ADMIN.secret, READER.secret, WRITER.secret, key) if secret in text]


def test_a_file_is_checked_alone(tmp_path: Path) -> None:
    """E-29: with the place of what is wrong, and exit code 2."""
    file = tmp_path / "broker.yaml"
    file.write_text("max_topics: 5\nmax_groups: 16000\n")
    assert config("check", str(file), METAQ_MAX_TOPICS="many").stdout == (
        f"{file} is valid: 2 settings, 1 of them differ from the default\n"
    )
    assert json.loads(config("check", str(file), "--json").stdout)["changed"] == ["max_topics"]
    file.write_text("max_topics: 5\nmax_gruops: 6\n")
    failed = config("check", str(file), code=2)
    assert failed.stderr == f"metaq: unknown setting 'max_gruops' in {file}:2; did you mean max_groups?\n"
    assert config("check", str(tmp_path / "absent.yaml"), code=2).stdout == ""


def test_the_files_of_this_project_are_in_order() -> None:
    """E-29, MQ-103: every file in conf/ for `metaq serve` and `metaq registry`."""
    for name in ("broker.yaml", "registry.yaml"):
        assert "is valid" in config("check", str(ROOT / "conf" / name)).stdout


def test_the_page_about_settings_is_what_the_command_prints() -> None:
    """E-29, MQ-103: every setting has a row, and the page is made of them."""
    page = config("doc").stdout
    assert (ROOT / "docs" / "configuration.md").read_text("utf-8") == page
    for name, field in FIELDS.items():
        assert f"| `{name}` | " in page
        assert str(field.rules.description).replace("|", "\\|") in page
