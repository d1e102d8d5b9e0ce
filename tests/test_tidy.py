"""Rules of style that no linter checks, over every file that git tracks."""

import ast
import gc
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
MAX_FILE_LINES: Final = 500
MAX_FUNCTION_LINES: Final = 60
TEXT_SUFFIXES: Final = {".c", ".cfg", ".h", ".java", ".md", ".py", ".sh", ".toml", ".xml", ".yaml", ".yml"}
TEXT_NAMES: Final = {".gitignore", "Makefile", "packages", "run"}
# Written in two parts, so that this file does not hold what it forbids.
MACHINE_PATHS: Final = ["/" + folder + "/" for folder in ("work", "root")]

# Names of two things in metaq, each with the reason why one name is right for both.
SHARED_CLASSES: Final = {
    "Half": "the in-memory broker has its own form of what it is in metaq.tx",
    "Halves": "the in-memory broker has its own form of what it is in metaq.tx",
}
SHARED_FUNCTIONS: Final = {
    "report": "the command starts the job of this name in a process of its own",
}

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef

pytestmark = pytest.mark.partner("git")


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [ROOT / name for name in listing.split("\0") if name]
    # A tracked file can be gone from the work tree until its removal is committed.
    present = [path for path in paths if path.is_file()]
    assert Path(__file__) in present
    return present


@pytest.fixture(scope="module")
def python_files(tracked: list[Path]) -> list[Path]:
    return [path for path in tracked if path.suffix == ".py"]


@pytest.fixture(scope="module")
def trees(python_files: list[Path]) -> dict[Path, ast.Module]:
    """Return all of them parsed, once for all tests: in a third of the time without the collector, which finds nothing."""
    gc.disable()
    try:
        return {path: ast.parse(path.read_bytes()) for path in python_files}
    finally:
        gc.enable()


def name(path: Path, line: int | None = None) -> str:
    return str(path.relative_to(ROOT)) + ("" if line is None else f":{line}")


def functions(tree: ast.Module) -> Iterator[AnyFunction]:
    for node in ast.walk(tree):
        if isinstance(node, AnyFunction):
            yield node


def lines_without_docstring(function: AnyFunction) -> int:
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def test_no_python_file_is_over_500_lines(python_files: list[Path]) -> None:
    counts = {name(path): len(path.read_text("utf-8").splitlines()) for path in python_files}
    assert {file: count for file, count in counts.items() if count > MAX_FILE_LINES} == {}


def test_no_function_is_over_60_lines(trees: dict[Path, ast.Module]) -> None:
    long = {
        f"{name(path, function.lineno)} {function.name}": lines_without_docstring(function)
        for path, tree in trees.items()
        for function in functions(tree)
        if lines_without_docstring(function) > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_the_length_of_a_function_leaves_its_docstring_out() -> None:
    (function,) = functions(ast.parse('def f():\n    """One.\n\n    Two.\n    """\n    return 1\n'))
    assert lines_without_docstring(function) == 2


def classes_by_name(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    """The modules that define each public class; those of ``metaq.aio`` have the names of what they make awaitable."""
    found: dict[str, set[str]] = {}
    for module, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not module.startswith("metaq.aio."):
                found.setdefault(node.name, set()).add(module)
    return found


def functions_imported(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    """The modules that define the functions which others import by name; ``import module`` leaves no doubt."""
    defined = {
        (module, node.name)
        for module, tree in modules.items()
        for node in tree.body
        if isinstance(node, AnyFunction) and not node.name.startswith("_")
    }
    found: dict[str, set[str]] = {}
    for tree in modules.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    if (node.module, alias.name) in defined:
                        found.setdefault(alias.name, set()).add(node.module)
    return found


def shared(found: dict[str, set[str]]) -> dict[str, set[str]]:
    return {name: modules for name, modules in found.items() if len(modules) > 1}


@pytest.fixture(scope="module")
def modules(trees: dict[Path, ast.Module]) -> dict[str, ast.Module]:
    """The modules of metaq by name."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in trees}
    return {name: trees[path] for path, name in names.items() if name.startswith("metaq.")}


def test_no_two_classes_have_one_name(modules: dict[str, ast.Module]) -> None:
    """A reader who meets a name in two modules must be right to take it for one thing."""
    found = shared(classes_by_name(modules))
    assert {name: modules for name, modules in found.items() if name not in SHARED_CLASSES} == {}
    assert SHARED_CLASSES.keys() <= found.keys()


def test_no_two_functions_are_imported_under_one_name(modules: dict[str, ast.Module]) -> None:
    found = shared(functions_imported(modules))
    assert {name: modules for name, modules in found.items() if name not in SHARED_FUNCTIONS} == {}
    assert SHARED_FUNCTIONS.keys() <= found.keys()


def test_shared_names_are_found() -> None:
    texts = {
        "metaq.a": "class Place: ...\nclass _Own: ...\ndef find(): ...",
        "metaq.b": "class Place: ...\nclass _Own: ...\ndef find(): ...",
        "metaq.aio.a": "class Place: ...",
        "metaq.c": "from metaq.a import find\nfrom metaq import b",
    }
    trees = {module: ast.parse(text) for module, text in texts.items()}
    assert shared(classes_by_name(trees)) == {"Place": {"metaq.a", "metaq.b"}}
    assert shared(functions_imported(trees)) == {}
    trees["metaq.d"] = ast.parse("from metaq.b import find")
    assert shared(functions_imported(trees)) == {"find": {"metaq.a", "metaq.b"}}


def arguments_and_elements(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from node.args
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            yield from node.elts


def packed(tree: ast.Module) -> Iterator[int]:
    """Lines where arguments or elements are packed into a display that is unpacked at once, as in ``f(*(a, b), c)``."""
    for node in arguments_and_elements(tree):
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List | ast.Set):
            yield node.lineno


def test_nothing_is_packed_only_to_be_unpacked(trees: dict[Path, ast.Module]) -> None:
    assert [name(path, line) for path, tree in trees.items() for line in packed(tree)] == []


def test_what_is_packed_is_found() -> None:
    plain = "f(*names, *(a for a in b), *(x or y)); (1, *names)"
    assert list(packed(ast.parse(plain))) == []
    assert list(packed(ast.parse("f(*(a, b))\n(1, *(2,))\n{*[1]}\n[*{1}]"))) == [1, 2, 3, 4]


def is_text(path: Path) -> bool:
    return path.suffix in TEXT_SUFFIXES or path.name in TEXT_NAMES


def test_text_files_have_unix_line_ends_and_no_trailing_whitespace(tracked: list[Path]) -> None:
    """SG-137."""
    untidy = [
        name(path, number)
        for path in tracked
        if is_text(path)
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1)
        if line != line.rstrip()
    ]
    assert untidy == []


def test_text_files_are_utf_8(tracked: list[Path]) -> None:
    """SG-137: without a byte order mark."""
    texts = [path for path in tracked if is_text(path)]
    for path in texts:
        assert not path.read_text("utf-8").startswith("\ufeff"), name(path)
    assert len(texts) > 100


def test_no_file_names_a_path_of_one_machine(tracked: list[Path]) -> None:
    named = [
        f"{name(path)} names {machine_path}"
        for path in tracked
        for machine_path in MACHINE_PATHS
        if machine_path.encode() in path.read_bytes()
    ]
    assert named == []
