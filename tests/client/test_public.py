"""What a person finds who looks: the names of the package, what they say of themselves, and nothing that is internal."""

import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Final

import metaq
from tests.docs import api
from tests.docs.api import ROOT

DEADLINE_S: Final = 120.0


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
    text = pydoc.render_doc(metaq, renderer=pydoc.plaintext)
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
