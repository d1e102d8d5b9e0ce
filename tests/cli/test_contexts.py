"""`metaq context`: addresses and logins under names, and which place counts when several name one."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from metaq.cli import commands
from metaq.cli.contexts import contexts_file, read_contexts
from tests.support.broker import BrokerProcess

PASSWORD = "correct-horse-battery"
NOBODY = "127.0.0.1:1"


class Person:
    """Somebody with a folder for settings."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.file = home / "metaq" / "contexts.yaml"
        self.variables: dict[str, str | None] = dict.fromkeys(("METAQ_BROKER", "METAQ_REGISTRY", "METAQ_CONTEXT"))

    def run(self, *arguments: str, code: int = 0, given: str = "", **variables: str) -> Result:
        env = {**self.variables, "XDG_CONFIG_HOME": str(self.home), **variables}
        done = CliRunner(env=env).invoke(commands, list(arguments), input=given)
        assert done.exit_code == code, (arguments, done.exit_code, done.output, done.exception)
        return done


@pytest.fixture
def person(tmp_path: Path) -> Person:
    return Person(tmp_path / "config")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("contexts")
    users = folder / "users.yaml"
    env = {"METAQ_PASSWORD": PASSWORD}
    done = CliRunner(env=env).invoke(commands, ["user", "add", "ops", "--admin", "--file", str(users)])
    assert done.exit_code == 0, done.output
    with BrokerProcess(folder / "data", "--users-file", str(users)) as process:
        yield process


def test_a_context_saves_the_options(person: Person, broker: BrokerProcess) -> None:
    where = ("--broker", broker.address, "--registry", broker.registry, "--user", "ops")
    added = person.run("context", "add", "prod", *where, METAQ_PASSWORD=PASSWORD)
    assert added.stdout == f"added prod to {person.file}\n"
    assert stat.S_IMODE(person.file.stat().st_mode) == 0o600
    person.run("context", "use", "prod")
    assert person.run("topic", "create", "orders", "2").stdout == "orders has 2 partitions\n"
    person.run("put", "orders", "hello")
    assert person.run("get", "orders").stdout == "hello\n"
    assert person.run("message", "tail", "orders").stdout == "hello\n"
    person.run("context", "use", "--none")
    person.run("get", "orders", code=3, METAQ_BROKER=NOBODY)
    assert person.run("--context", "prod", "get", "orders").stdout == "hello\n"
    assert person.run("get", "orders", METAQ_CONTEXT="prod").stdout == "hello\n"


def test_a_password_from_a_file_or_asked_for(person: Person, broker: BrokerProcess, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(f"{PASSWORD}\n")
    login = ("--broker", broker.address, "--user", "ops")
    person.run("context", "add", "filed", *login, "--password-file", str(secret))
    person.run("context", "add", "piped", *login, "--password-file", "-", given=f"{PASSWORD}\n")
    person.run("context", "add", "asking", *login)
    for name, given in (("filed", ""), ("piped", ""), ("asking", f"{PASSWORD}\n")):
        assert "pid " in person.run("--context", name, "stats", given=given).stdout
    listed = person.run("context", "list", "--json").stdout
    assert '"password": "kept"' in listed and '"password": "asked for"' in listed
    assert PASSWORD not in listed + person.run("context", "show", "filed").stdout


def test_what_counts_when_several_places_name_an_address(person: Person) -> None:
    for name in ("used", "named"):
        person.run("context", "add", name, "--broker", f"{name}.invalid", "--registry", f"{name}.invalid")
    person.run("context", "use", "used")

    def asked(*arguments: str, **variables: str) -> str:
        return person.run(*arguments, code=3, **variables).stderr.split()[4]

    assert asked("get", "t") == "used.invalid:8123:"
    assert asked("get", "t", METAQ_CONTEXT="named") == "named.invalid:8123:"
    assert asked("get", "t", METAQ_CONTEXT="named", METAQ_BROKER="variable.invalid") == "variable.invalid:8123:"
    named = ("--context", "named")
    assert asked(*named, "get", "t", METAQ_CONTEXT="used", METAQ_BROKER="variable.invalid") == "named.invalid:8123:"
    assert asked(*named, "get", "t", "--broker", "option.invalid", METAQ_BROKER="variable.invalid") == "option.invalid:8123:"
    assert asked("topic", "list", "--broker", "option.invalid") == "option.invalid:8123:"


def test_a_context_with_one_kind_of_address(person: Person) -> None:
    """Commands that need the other kind say so, instead of asking this machine."""
    person.run("context", "add", "one", "--broker", "b.invalid")
    person.run("context", "add", "all", "--registry", "r.invalid;s.invalid:9")
    missing = "the context all has no broker; give --broker HOST, or add the context again with one"
    assert missing in person.run("--context", "all", "get", "t", code=2).stderr
    assert "the context one has no registry" in person.run("--context", "one", "group", "list", code=2).stderr
    assert "cannot connect to b.invalid:8123" in person.run("--context", "one", "topic", "list", code=3).stderr
    assert "r.invalid:9876" in person.run("--context", "all", "topic", "list", code=3, METAQ_BROKER=NOBODY).stderr


def test_contexts_are_replaced_and_removed(person: Person) -> None:
    person.run("context", "add", "prod", "--broker", "a")
    assert "add --replace" in person.run("context", "add", "prod", "--broker", "b", code=2).stderr
    person.run("context", "add", "prod", "--broker", "b", "--replace")
    person.run("context", "use", "prod")
    assert "b:8123" in person.run("context", "show").stdout
    assert person.run("context", "remove", "prod").stdout == "removed prod; no context is in use now\n"
    assert "no context is in use" in person.run("context", "show", code=1).stderr
    assert "there are no contexts" in person.run("context", "list").stderr


BROKEN: dict[str, tuple[str, str]] = {
    "no YAML": ("contexts:\n  prod: {registry: a\n", "{file}:3: this is no YAML: expected ',' or '}}', but got '<stream end>'"),
    "a list": ("- prod\n", "{file}:1: here stand lines of the form `name: value`"),
    "unknown": (
        "contexts:\n  prod:\n    registri: a\n",
        "{file}:3: 'registri' has no meaning here; there are registry, broker",
    ),
    "twice": ("contexts:\n  prod:\n    broker: a\n  prod:\n    broker: b\n", "{file}:4: prod stands here a second time"),
    "deep": ("contexts:\n  prod:\n    broker: [a, b]\n", "{file}:3: broker is one word or number, not a list"),
    "used": ("contexts:\n  prod:\n    broker: a\nuse: prd\n", "{file}:4: there is no context prd to use"),
    "top": ("context: {}\n", "{file}:1: 'context' has no meaning here; there are use and contexts"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_named_with_its_line(person: Person, kind: str) -> None:
    content, answer = BROKEN[kind]
    person.file.parent.mkdir(parents=True)
    person.file.write_text(content)
    for command in (("context", "list"), ("get", "t"), ("--context", "prod", "topic", "list")):
        found = person.run(*command, code=2).stderr
        assert found.startswith("metaq: " + answer.format(file=person.file)), found
        assert found.endswith("; mend the line, or delete the file and add its contexts again\n")


def test_a_file_that_others_can_read_is_refused_if_it_has_a_password(person: Person) -> None:
    person.run("context", "add", "prod", "--broker", "a", "--user", "ops", METAQ_PASSWORD=PASSWORD)
    person.file.chmod(0o644)
    assert f"others may read it; take that from them: chmod 600 {person.file}" in person.run("get", "t", code=2).stderr
    assert person.run("serve", "--help").stdout


def test_a_user_without_a_home_has_no_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, where a user may be only a number."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(os, "getuid", lambda: 1_234_567)
    assert contexts_file() == Path("/.config/metaq/contexts.yaml")
    assert read_contexts(contexts_file()).by_name == {}


def test_bytes_that_are_no_text(person: Person) -> None:
    person.file.parent.mkdir(parents=True)
    person.file.write_bytes(b"contexts:\n  \xff: {}\n")
    assert f"metaq: {person.file}:2: this is no text in UTF-8" in person.run("context", "list", code=2).stderr


@pytest.mark.parametrize("name", ["a b", "", "x" * 65])
def test_names_of_contexts(person: Person, name: str) -> None:
    assert "cannot name a context" in person.run("context", "add", name, "--broker", "a", code=2).stderr
