"""The sources of settings, and the errors for wrong ones."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from metaq.config import ENVIRONMENT_OF_CLIENTS, FIELDS, LIVE, Settings, check, gather_settings, load
from metaq.configfile import write_value
from metaq.engine.parts import retention_rules, room
from metaq.engine.tables.topics import reply_topic
from metaq.errors import ConfigError
from metaq.fields import from_values
from metaq.protocol.record import MAX_TOPIC_LENGTH
from tests.docs.examples import ROOT

FILE: Final = "max_topics: 30\n\nmax_groups: 40\ntopics:\n  made: {partitions: 2}\n"


def written(folder: Path, text: str) -> Path:
    file = folder / "broker.yaml"
    file.write_text(text)
    return file


def test_each_setting_has_an_origin(tmp_path: Path) -> None:
    """E-29: the one who has the last word, with the line."""
    file = written(tmp_path, FILE)
    given = gather_settings(file, {"METAQ_MAX_GROUPS": "41", "METAQ_MAX_BODY_BYTES": "42"}, {"max_body_bytes": "43"})
    assert {name: said.origin for name, said in given.items()} == {
        "max_topics": f"{file}:1",
        "max_groups": "METAQ_MAX_GROUPS",
        "topics": f"{file}:4",
        "max_body_bytes": "--max-body-bytes",
    }
    settings = check(given)
    assert (settings.max_topics, settings.max_groups, settings.max_body_bytes) == (30, 41, 43)
    assert settings.topics["made"].partitions == 2


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            "max_topcs: 1\nlog_levle: INFO\n",
            ["'max_topcs' in {}:1; did you mean max_topics?", "in {}:2; did you mean log_level?"],
        ),
        ("max_topics: many\nsegment_bytes: 40\n", ["max_topics: must be a whole number", "({}:1)", "({}:2)"]),
        ("topics: {a: {partitons: 1}}\n", ["topics.a.partitons: there is no such name ({}:1)"]),
        ("max_topics: 1\nmax_groups: 1\nmax_topics: 2\n", ["max_topics is set twice, in {}:1 and in line 3"]),
        ("clean_ratio: 0.9\nrefuse_ratio: 0.8\n", ["clean_ratio must not be above force_ratio"]),
        ("- max_topics\n", ["{} is not a list of `setting: value` lines"]),
        ("max_topics: [1\n", ["cannot read the configuration file {}:2: this is no YAML"]),
        ("max_topics: 1\nkeep_hours: 2024-99-99\n", ["keep_hours: '2024-99-99' cannot be read as timestamp ({}:2)"]),
        ("max_topics: 0x_\n", ["max_topics: '0x_' cannot be read as int ({}:1)"]),
        ("log_level: !!int a\n", ["log_level: 'a' cannot be read as int ({}:1)"]),
        ("max_topics: !!int ''\n", ["max_topics: '' cannot be read as int ({}:1)"]),
        ("sql_filter: !!bool maybe\n", ["sql_filter: 'maybe' cannot be read as bool ({}:1)"]),
        ("log_level: !!timestamp now\n", ["log_level: 'now' cannot be read as timestamp ({}:1)"]),
        ("topics: {a: {partitions: 0x_}}\n", ["topics: the value cannot be read as map ({}:1)"]),
        ("keep_hours: 1:" + "1:" * 300 + "1.5\n", ["keep_hours: '1:1:", "cannot be read as float ({}:1)"]),
        ('advertise: "\\UFFFFFFFF"\n', ["cannot read the configuration file {}"]),
        ("topics: " + "[" * 5000 + "\n", ["cannot read the configuration file {}"]),
        (
            "keep_hours: .inf\nclean_ratio: .nan\n",
            ["keep_hours: inf is no length of time", "({}:1)", "clean_ratio: ", "({}:2)"],
        ),
        ("keep_hours: 1e7\n", ["keep_hours: '1e7' must be at most 1000000h ({}:1)"]),
        (f"idle_timeout_ms: {'9' * 400}\n", ["idle_timeout_ms: 9999", "… must be at most 9223372036854775807ms ({}:1)"]),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_line(tmp_path: Path, text: str, problems: list[str]) -> None:
    """E-29, MQ-103: all of it at once."""
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as failed:
        load(file, {}, {})
    for problem in problems:
        assert problem.format(file) in str(failed.value)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400"])
def test_no_setting_is_endless(value: str) -> None:
    """E-29: whoever says so; what is computed with them would fail when they are in force already."""
    numbers = [name for name, field in FIELDS.items() if field.annotation in {int, float}]
    assert len(numbers) > 50
    for name in numbers:
        with pytest.raises(ConfigError, match=f"{name}: .* \\(METAQ_{name.upper()}\\)"):
            load(None, {f"METAQ_{name.upper()}": value}, {})


def test_no_setting_is_a_secret() -> None:
    """E-05, E-29: all of them are shown; secrets stand in files that settings name."""
    words = re.compile("password|secret|token|key|credential|login")
    assert {name for name in FIELDS if words.search(name)} == {"tls_key", "failed_logins_per_minute"}
    assert "private key (PEM)" in str(FIELDS["tls_key"].rules.description)  # a file's name
    assert "METAQ_PASSWORD" in ENVIRONMENT_OF_CLIENTS
    assert gather_settings(None, {"METAQ_PASSWORD": "a secret", "METAQ_USER": "a"}, {}) == {}


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    """MQ-103."""
    assert load(written(tmp_path, "# nothing\n"), {}, {}) == from_values(Settings, {})


def test_a_value_is_written_as_it_is_read() -> None:
    """E-29: so what is shown is a file."""
    for value in (True, 1, 0.5, "", "none", "a: b", "on", "x" * 200, {}, {"t": {"partitions": 1}}):
        assert yaml.safe_load(f"name: {write_value(value)}")["name"] == value
        assert "\n" not in write_value(value)


def test_settings_that_change_have_to_fit_those_that_stay() -> None:
    """E-29: a reload takes over some settings of a file that is right only as a whole."""
    settings = load(None, {}, {"segment_bytes": 1 << 20, "max_body_bytes": 1 << 19})
    assert settings.merged({"max_body_bytes": 1000}).max_body_bytes == 1000
    with pytest.raises(ConfigError, match="segment_bytes must be at least max_body_bytes"):
        settings.merged({"max_body_bytes": 1 << 20})


@pytest.mark.parametrize(("setting", "longest"), [("broker_name", 127), ("cluster_name", 115)])
@pytest.mark.parametrize("name", ["my broker", "", "é", "a/b", "a\n"])
def test_names_that_no_protocol_can_carry(setting: str, longest: int, name: str) -> None:
    """E-29: handles of delayed messages have words, and broker and cluster have topics of their names."""
    for each in (name, "a" * (longest + 1)):
        with pytest.raises(ConfigError, match=f"{setting} is .*; 1 to {longest} letters, digits and .* are allowed"):
            load(None, {}, {setting: each})


@pytest.mark.parametrize("name", ["metaq", "broker-a_1", "b.example.com", "%|", "a" * 115])
def test_names_of_broker_and_cluster(name: str) -> None:
    """E-29: as RocketMQ's brokers have them, which are named after their hosts; a cluster has a topic of replies, too."""
    settings = load(None, {}, {"broker_name": name, "cluster_name": name})
    assert (settings.broker_name, settings.cluster_name) == (name, name)
    assert len(reply_topic(name)) <= MAX_TOPIC_LENGTH


def test_what_places_data_cannot_change_while_it_is_used() -> None:
    """E-29."""
    fixed = {"data", "listen", "segment_bytes", "queue_file_bytes", "durability", "role", "broker_name", "broker_number"}
    assert not fixed & LIVE
    assert set(FIELDS) >= LIVE


def test_limits_of_transactions_and_of_retention_are_taken_over() -> None:
    """E-29: by the parts that do not know the settings."""
    old = room(load(None, {}, {}))
    old.open_bytes = 5
    old.take_limits(room(load(None, {}, {"max_branches": 7, "max_branch_bytes": 2048, "transaction_timeout_ms": 3000})))
    assert (old.max_branches, old.max_branch_bytes, old.max_timeout_s, old.open_bytes) == (7, 2048, 3.0, 5)
    rules = retention_rules(load(None, {}, {"keep_hours": 1, "delete_hour": 9, "least_free_bytes": 1}))
    assert (rules.keep_ms, rules.hour, rules.least_free_bytes) == (3_600_000, 9, 1)


def copies(path: Path) -> Iterator[str]:
    """The live settings that a constructor reads: it runs once, so what it keeps of them would never change."""
    for function in ast.walk(ast.parse(path.read_bytes())):
        if not (isinstance(function, ast.FunctionDef) and function.name == "__init__"):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and node.attr in LIVE and "settings" in ast.unparse(node.value):
                yield f"{path.name}: {node.attr}"


def test_no_part_keeps_a_copy_of_a_setting_that_can_change() -> None:
    """E-29: what copies one does it in `configure`, which a reload calls."""
    rooms = ROOT / "metaq" / "engine", ROOT / "metaq" / "server"
    found = {copy for room in rooms for path in room.rglob("*.py") for copy in copies(path)}
    assert found == {
        "engine.py: check_after_ms",  # told to a part that does not know the settings; `Engine.configure` tells it again
        "pull.py: max_hold_ms",  # of one question, which is made anew for each pull
    }
