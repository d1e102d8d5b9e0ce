"""What a person finds who looks: the names of the package, what they say of themselves, and nothing that is internal."""

import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import metaq
from metaq.errors import MetaqError
from tests.docs import api
from tests.docs.api import ROOT, Member

DEADLINE_S: Final = 120.0
RAISE_NOTHING: Final = {
    "metaq.Admin": {"leases", "offset_export", "replicas", "timers", "transactions"},
    "metaq.Backoff": {"pause_s"},
    "metaq.Client": {"close"},
    "metaq.Interceptor": {"processing", "received", "sending", "settling", "written"},
    "metaq.LeaseConsumer": {"__iter__", "close"},
    "metaq.Producer": {"close"},
    "metaq.PullConsumer": {"assignment", "close"},
    "metaq.PushConsumer": {"assignment", "close"},
    "metaq.SimpleConsumer": {"assignment", "close"},
    "metaq.TextClient": {"close"},
    "metaq.TransactionProducer": {"close"},
    "metaq.testing": {"broker"},
    "metaq.testing.InMemoryBroker": {
        "advance",
        "check_transactions",
        "committed",
        "dead_letters",
        "messages",
        "reset_offsets",
    },
}
"""What raises no error of metaq."""
ELSEWHERE: Final = re.compile(r"\b[Ss]ee ``metaq\.[A-Z]")
"""A face for asyncio says where its blocking form is described."""


def printed(program: str, folder: Path) -> str:
    """What a new interpreter prints that runs a program as a script in a folder."""
    script = folder / "program.py"
    script.write_text(program, "utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=DEADLINE_S, check=True, cwd=folder)
    return done.stdout


def test_names_are_there_before_they_are_imported(tmp_path: Path) -> None:
    """Dir, tab and help know them, and importing the package still imports nothing else of it."""
    program = "import sys, metaq; print(*dir(metaq)); print(*(name for name in sys.modules if name.startswith('metaq.')))"
    names, imported = printed(program, tmp_path).splitlines()
    assert set(metaq.__all__) <= set(names.split())
    assert "importlib" not in names.split()
    assert imported == ""


def test_parts_are_there_after_the_import(tmp_path: Path) -> None:
    """As attributes, too."""
    program = "import metaq; print(metaq.aio.connect.__name__, metaq.testing.broker.__name__, metaq.errors.MetaqError.__name__)"
    assert printed(program, tmp_path) == "connect broker MetaqError\n"


def test_a_wrong_name_is_told_with_the_near_one(tmp_path: Path) -> None:
    """As for any other module."""
    script = tmp_path / "program.py"
    script.write_text("import metaq\nmetaq.conect", "utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.stderr.endswith("AttributeError: module 'metaq' has no attribute 'conect'. Did you mean: 'connect'?\n")


def test_help_shows_what_there_is() -> None:
    """Classes with their methods, and functions."""
    text = pydoc.render_doc(metaq, renderer=pydoc.TextDoc())
    text = re.sub(".\b", "", text)  # bold
    assert "class Producer(" in text
    assert "connect(address: str, *, timeout_s: float" in text
    assert "class SendFailed(" in text


def test_a_clone_beside_a_script_does_not_hide_the_package(tmp_path: Path) -> None:
    """A folder `metaq` without `__init__.py` is a namespace package, which only counts when nothing else is found."""
    (tmp_path / "metaq" / "metaq").mkdir(parents=True)
    (tmp_path / "metaq" / "metaq" / "__init__.py").touch()
    assert printed("import metaq; print(metaq.__file__)", tmp_path) == f"{ROOT / 'metaq' / '__init__.py'}\n"


def test_the_public_names_are_those_of_the_list() -> None:
    """A change is seen in review; ``python -m tests.docs.api`` writes the list."""
    assert api.LIST.read_text("utf-8") == api.listing()


def functions() -> list[Member]:
    """Public functions and methods, without those whose description is that of another one."""
    found = [member for member in api.everything() if member.is_function]
    assert len(found) > 250
    return [member for member in found if not (member.name.startswith("metaq.aio.") and is_described_elsewhere(member))]


def is_described_elsewhere(member: Member) -> bool:
    return ELSEWHERE.search(member.doc) is not None or member.name.endswith((".__aiter__", ".close"))


def test_all_that_is_public_says_what_it_is() -> None:
    """Classes, functions, methods and properties have docstrings."""
    silent = [
        member.name
        for member in api.everything()
        if (member.is_function or isinstance(member.value, type | property)) and not member.doc
    ]
    assert silent == []


def test_docstrings_name_each_parameter() -> None:
    """Args has the parameters of the signature, in its order."""
    wrong = {
        member.name: (names, described)
        for member in functions()
        for names in [[one.name for one in member.parameters]]
        for described in [[name for name, _ in api.parsed(member.doc).sections.get("Args", [])]]
        if names != described
    }
    assert wrong == {}


def test_docstrings_say_what_is_returned() -> None:
    """In their first paragraph, or in Returns."""
    wrong = [
        member.name
        for member in functions()
        if member.returns is not None
        and not {"Returns", "Yields"} & api.parsed(member.doc).sections.keys()
        and not re.search(r"\b([Rr]eturn|[Yy]ield|gets)", member.doc.split("\n\n")[0])
    ]
    assert wrong == []


def test_docstrings_name_errors_that_exist() -> None:
    """Raises has errors of metaq, which a program can catch as ``metaq.X``; what raises none is known."""
    wrong: dict[str, set[str]] = {}
    for member in functions():
        errors = {name for name, _ in api.parsed(member.doc).sections.get("Raises", [])}
        where, _, own = member.name.removeprefix("async ").rpartition(".")
        is_quiet = own in RAISE_NOTHING.get(where.replace("metaq.aio.", "metaq."), set())
        strange = {name for name in errors if not is_error(getattr(metaq, name, None))}
        if strange or is_quiet == bool(errors):
            wrong[member.name] = strange
    assert wrong == {}


def is_error(found: object) -> bool:
    return inspect.isclass(found) and issubclass(found, MetaqError)


def test_docstrings_are_taken_apart() -> None:
    """Texts, entries over several lines, and what stands behind the sections."""
    doc = api.parsed(
        "Do.\n\n    More.\n\n    Args:\n        a: one\n            two.\n        *b: three.\n\n    Raises:\n        X: four.\n"
    )
    assert doc.text == "Do.\n\nMore."
    assert doc.sections == {"Args": [("a", "one two."), ("b", "three.")], "Raises": [("X", "four.")]}
