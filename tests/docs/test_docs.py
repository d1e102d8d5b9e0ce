"""Statements of the documents are true: sessions, settings, features, links, layers."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import yaml

import metaq
from metaq.config import FIELDS, REGISTRY_SETTINGS, TopicSettings, load
from metaq.deploy.unit import OPEN_FILES
from metaq.engine.figures.history import Figures
from metaq.errors import ConfigError
from metaq.fields import declared, plain
from metaq.protocol.record import HEADER_SIZE
from metaq.protocol.remoting.attributes import GROUP_ATTRIBUTES
from metaq.protocol.text.lines import READERS
from metaq.protocol.text.messages import HEADER_SIZE_TEXT
from metaq.protocol.text.replies import BAD_REQUEST, CONFLICT, ERROR, FORBIDDEN, MOVED, NOT_FOUND, OK, UNAVAILABLE
from metaq.server.api.openapi import document as document_of_the_api
from metaq.server.http.http import OWN
from metaq.server.http.metrics import OF_BROKERS
from metaq.store.checkpoint import LIVE_SIZE
from metaq.store.index import indexfile
from metaq.store.index.indexfile import ITEM_SIZE
from metaq.store.queues.consumequeue import UNIT_SIZE
from tests.docs import api, tree
from tests.docs.examples import ROOT, Fence, fences, play
from tests.docs.shell import NAMED
from tests.support.broker import BrokerProcess

PROTOCOL: Final = "docs/protocol.md"
FEATURES: Final = "docs/features.md"
CONFIGURATION: Final = ROOT / "conf" / "broker.yaml"
REGISTRY_CONFIGURATION: Final = ROOT / "conf" / "registry.yaml"
MOST_MODULES: Final = 16
OF_THE_PROJECT: Final = {"setup.py", "build_metaq.py", "fabfile.py", "mkdocs_hooks.py"}
"""Modules in the project's own folder."""
BESIDE_README: Final = ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
DOCUMENTS: Final = ["README.md", *BESIDE_README, *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
SUFFIXES: Final = "|".join(sorted({name.rpartition("_")[2] for name in FIELDS}))
SESSIONS: Final = [*fences(PROTOCOL, "telnet"), *fences("docs/timers.md", "telnet"), *fences("docs/leases.md", "telnet")]
METRICS: Final = {metric.name for metric in (*OWN, *OF_BROKERS)}


def text_of(document: str) -> str:
    return (ROOT / document).read_text("utf-8")


# -- sessions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fence", SESSIONS, ids=lambda fence: fence.place)
def test_session(broker: BrokerProcess, fence: Fence) -> None:
    """MQ-057, MQ-058, MQ-062: what the document shows is what a broker answers."""
    with broker.connect() as connection:
        play(fence, connection)


def test_every_command_and_status_is_described() -> None:
    """MQ-057, MQ-062: no word of the protocol is left out."""
    text = text_of(PROTOCOL)
    assert len(SESSIONS) > 10
    for word in ("put", "sync", *READERS):
        described = re.search(rf"^    {word}\b|^\| `{word}\b", text, re.MULTILINE)
        assert described, word
    for status in (OK, MOVED, BAD_REQUEST, FORBIDDEN, NOT_FOUND, CONFLICT, ERROR, UNAVAILABLE):
        assert re.search(rf"^\| {status} \|", text, re.MULTILINE), status


# -- settings ---------------------------------------------------------------------------------------------------------


def test_the_settings_file_names_every_setting_with_its_default() -> None:
    """MQ-103, ES-017: and in the order of the help; it loads, and changes nothing."""
    content: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text("utf-8"))
    assert list(content) == list(FIELDS)
    defaults = load(None, {}, {})
    assert load(CONFIGURATION, {}, {}) == defaults
    assert content == plain(defaults)


def test_the_settings_file_of_a_registry_names_its_settings_with_their_defaults() -> None:
    """SG-103: in the order of the help; what only a broker has is refused, with its name."""
    content: dict[str, Any] = yaml.safe_load(REGISTRY_CONFIGURATION.read_text("utf-8"))
    assert tuple(content) == REGISTRY_SETTINGS
    defaults = load(None, {}, {})
    assert load(REGISTRY_CONFIGURATION, {"METAQ_DURABILITY": "memory"}, {}, REGISTRY_SETTINGS) == defaults
    assert content == {name: value for name, value in plain(defaults).items() if name in REGISTRY_SETTINGS}
    with pytest.raises(ConfigError, match="unknown setting 'listen'"):
        load(CONFIGURATION, {}, {}, REGISTRY_SETTINGS)


def test_the_settings_file_explains_every_setting() -> None:
    """MQ-103: above each setting, or the group of settings that it belongs to, there is a comment."""
    for block in CONFIGURATION.read_text("utf-8").split("\n\n"):
        lines = block.splitlines()
        assert lines[0].startswith("#"), block
    named = re.findall(r"^(\w+):", CONFIGURATION.read_text("utf-8"), re.MULTILINE)
    assert named == list(FIELDS)


def test_the_topics_that_the_settings_file_shows_load(tmp_path: Path) -> None:
    """MQ-006, MQ-115: the example in its comment."""
    lines = CONFIGURATION.read_text("utf-8").partition("#   topics:\n")[2].partition("topics: {}")[0].splitlines()
    example = tmp_path / "broker.yaml"
    example.write_text("topics:\n" + "".join(f"  {line.removeprefix('#').strip()}\n" for line in lines))
    topics = load(example, {}, {}).topics
    usual = plain(TopicSettings())
    assert {name: dict(plain(topic).items() - usual.items()) for name, topic in topics.items()} == {
        "orders": {"partitions": 8},
        "alarms": {"partitions": 3, "priority": True},
        "audit": {"accept_subscribe": False},
        "payments": {"dedupe_window_ms": 600_000},
        "archive": {"accept_publish": False},
    }


@pytest.mark.parametrize("document", DOCUMENTS)
def test_settings_that_a_document_names_exist(document: str) -> None:
    """MQ-103: whatever is written like a setting is one."""
    named = set(re.findall(rf"`(\w+_(?:{SUFFIXES}))`", text_of(document)))
    statistics = {name for fence in SESSIONS for name in re.findall(r"^(\w+) ", fence.text, re.MULTILINE)}
    known = set(FIELDS) | set(declared(TopicSettings)) | set(GROUP_ATTRIBUTES)
    if document == "docs/rest.md":
        schemas = document_of_the_api()["components"]["schemas"]
        known |= {field for schema in schemas.values() for field in schema.get("properties", ())}
        known |= {"wait_ms", *Figures._fields}
    if document == "docs/api.md":
        known |= {one.name for member in api.everything() if member.is_function for one in member.parameters}
    assert named - known - statistics - METRICS == set()


# -- storage format ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "sizes"),
    [
        ("docs/storage-format.md", [HEADER_SIZE, UNIT_SIZE, indexfile.HEADER_SIZE, ITEM_SIZE, LIVE_SIZE]),
        (PROTOCOL, [HEADER_SIZE_TEXT]),
    ],
)
def test_the_fields_of_a_drawing_follow_each_other(document: str, sizes: list[int]) -> None:
    """SG-016, MQ-015: the fields of fixed size, without a gap, up to the size that the code has."""
    found = []
    for drawing in re.findall(r"^ +at +size +field.*\n((?:    .+\n)+)", text_of(document), re.MULTILINE):
        at = 0
        for start, size in re.findall(r"^ +(\d+) +(\d+)  +\S", drawing, re.MULTILINE):
            assert int(start) == at, drawing
            at += int(size)
        found.append(at)
    assert found == sizes


# -- architecture -----------------------------------------------------------------------------------------------------


def test_the_layers_are_those_that_lint_checks() -> None:
    """SG-009: the drawing and the rule of import-linter say the same."""
    (drawing,) = fences("docs/architecture.md", "layers")
    drawn = [re.split(r"  +", line)[0] for line in drawing.text.splitlines()]
    contracts = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract.get("containers") == ["metaq"]]
    assert drawn == layers


def test_the_tree_is_that_of_the_modules() -> None:
    """SG-009: each module with its first line. To write it anew: python -m tests.docs.tree"""
    assert text_of("docs/architecture.md") == tree.written(text_of("docs/architecture.md"))


def test_no_folder_is_too_full() -> None:
    """SG-009: a newcomer finds a module by the tree alone."""
    folders = [folder for folder in (ROOT / "metaq").rglob("*") if (folder / "__init__.py").is_file()]
    full = {folder.name: count for folder in folders if (count := len(list(folder.glob("*.py")))) > MOST_MODULES}
    assert full == {}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_a_document_names_exist(document: str) -> None:
    """Modules by name, links by path; programs that a page shows are there, too."""
    text = text_of(document)
    programs = {named[1] for fence in fences(document, "python") if (named := NAMED.match(fence.text)) is not None}
    modules = programs | {
        path.name for folder in ("metaq", "tests", "examples", "integrations") for path in (ROOT / folder).rglob("*.py")
    }
    assert set(re.findall(r"\b\w+\.py\b", text)) - modules - OF_THE_PROJECT == set()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text("utf-8")), link


def anchors(text: str) -> set[str]:
    """The names by which headings are linked to."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_list_of_changes_has_this_version_first() -> None:
    """SG-137: in the form of keep a changelog."""
    headings = re.findall(r"^## (.+)$", text_of("CHANGELOG.md"), re.MULTILINE)
    assert re.fullmatch(rf"\[({re.escape(metaq.__version__)}|Unreleased)\]( - (unreleased|\d{{4}}-\d\d-\d\d))?", headings[0])
    kinds = set(re.findall(r"^### (.+)$", text_of("CHANGELOG.md"), re.MULTILINE))
    assert kinds and kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_advice_on_machines_goes_with_the_settings() -> None:
    """RD-009: which scheduler for which disk; open files as the unit has them, for so many connections and files."""
    rows = [line.strip("|").split("|") for line in text_of("docs/operations.md").splitlines() if line.startswith("| ")]
    advice = {what.strip(): (set_to, why) for what, set_to, why in (row for row in rows if len(row) == 3)}
    scheduler, _ = advice["scheduler of the disk"]
    assert all(name in scheduler for name in ("`none`", "`mq-deadline`", "/queue/scheduler"))
    files, why = advice["open files"]
    settings = load(None, {}, {})
    assert f"{OPEN_FILES:,} (`LimitNOFILE`" in files
    assert f"{settings.max_connections:,} connections" in why
    assert f"{settings.max_open_files:,} files" in why


# -- features ---------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A line of the table of features."""

    name: str
    state: str
    reason: str
    test: str


def read_rows() -> list[Row]:
    rows = []
    for line in text_of(FEATURES).splitlines():
        if re.match(r"\| [A-Z]+-\d+ \|", line):
            name, _, state, test = (cell.strip() for cell in line.strip("|").split("|"))
            words, _, reason = state.partition(":") if ":" in state else state.partition(",")
            rows.append(Row(name, words, reason.strip(), test.strip("`")))
    return rows


def promised() -> Iterator[str]:
    """The features that the table has to speak of."""
    for system, ranges in (
        ("MQ", ((1, 34), (37, 41), (44, 81), (101, 104), (107, 112), (115, 116))),
        (
            "SG",
            ((1, 142),),
        ),
        ("RD", ((1, 28), (101, 107))),
        ("MY", ((1, 35),)),
        ("ES", ((1, 20), (101, 103))),
    ):
        for first, last in ranges:
            yield from (f"{system}-{number:03d}" for number in range(first, last + 1))
    yield from (
        "E-01",
        "E-02",
        "E-03",
        "E-04",
        "E-05",
        "E-06",
        "E-07",
        "E-08",
        "E-09",
        "E-10",
        "E-12",
        "E-13",
        "E-15",
        "E-17",
        "E-18",
        "E-19",
        "E-20",
        "E-22",
        "E-29",
        "E-30",
        "E-31",
        "E-32",
        "E-33",
    )


def test_the_table_of_features_is_complete() -> None:
    """Each promised feature has one row, and each row one of three states, with a reason unless it is done."""
    rows = read_rows()
    assert [row.name for row in rows] == list(promised())
    assert {row.state for row in rows} == {"done", "partly", "not yet"}
    assert [row.name for row in rows if row.state != "done" and not row.reason] == []


@pytest.mark.parametrize("row", [row for row in read_rows() if row.state == "done" or row.test], ids=lambda row: row.name)
def test_a_feature_is_held_by_its_test(row: Row) -> None:
    """The file exists, and the docstring of a test in it names the feature."""
    tree = ast.parse((ROOT / "tests" / row.test).read_bytes())
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert any(re.search(rf"\b{row.name}\b", ast.get_docstring(test) or "") for test in tests)
