"""Contexts: addresses and logins of brokers under a name, in one file of the user."""

import contextlib
import os
import stat
from pathlib import Path
from typing import Any, Final, NamedTuple

from metaq.errors import ConfigError
from metaq.suggestions import did_you_mean

CONTEXT_VARIABLE: Final = "METAQ_CONTEXT"
_FILE: Final = Path("metaq", "contexts.yaml")
_USED: Final = "use"
_CONTEXTS: Final = "contexts"
_MEND: Final = "mend the line, or delete the file and add its contexts again"
_FOR_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class NamedAccess(NamedTuple):
    """Where commands connect to, and as whom; what is empty is not set."""

    registry: str = ""
    broker: str = ""
    user: str = ""
    password: str = ""
    tls_ca: str = ""


class Contexts(NamedTuple):
    """The contexts of a user by name, and the name of the one in use; empty without."""

    used: str
    by_name: dict[str, NamedAccess]

    def named(self, name: str, origin: str) -> NamedAccess:
        """Return a context; ``ConfigError`` naming ``origin``, which asked for it, when there is none."""
        if name in self.by_name:
            return self.by_name[name]
        advice = did_you_mean(name, self.by_name) or "; metaq context list shows those that there are"
        raise ConfigError(f"{origin}: there is no context {name}{advice}")


class _Broken(ConfigError):
    """A line of the file that cannot be used."""

    def __init__(self, file: Path, line: int, problem: str) -> None:
        super().__init__(f"{file}:{line}: {problem}; {_MEND}")


def contexts_file() -> Path:
    """Return the file of this user, in ``XDG_CONFIG_HOME``, by default ``~/.config``; who has no home has ``/``."""
    folder = os.environ.get("XDG_CONFIG_HOME")
    if folder:
        return Path(folder, _FILE)
    try:
        home = Path.home()
    except RuntimeError:  # a user who is only a number, as in containers
        home = Path("/")
    return home / ".config" / _FILE


def read_contexts(file: Path) -> Contexts:
    """Return the contexts in a file; none when there is no file, or when it is another user's, as ``sudo -u`` leaves HOME.

    ``ConfigError`` names the file, and the line, that cannot be read, and refuses passwords that others can read.
    """
    try:
        text = file.read_text("utf-8")
        mode = file.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return Contexts("", {})
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise _Broken(file, line, "this is no text in UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    found = _parse(file, text)
    if mode & _FOR_OTHERS and any(context.password for context in found.by_name.values()):
        raise ConfigError(f"{file} holds passwords, and others may read it; take that from them: chmod 600 {file}")
    return found


def write_contexts(file: Path, contexts: Contexts) -> None:
    """Replace a file, as one step; only its owner may read it. ``ConfigError`` when it cannot be written."""
    import yaml  # noqa: PLC0415 - most commands need none

    rows = {name: _set_values(context) for name, context in contexts.by_name.items()}
    document = ({_USED: contexts.used} if contexts.used else {}) | {_CONTEXTS: rows}
    text = "# written by metaq context\n" + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(fresh, "x", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as stream:
            stream.write(text)
        fresh.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error


def without(contexts: Contexts, name: str) -> Contexts:
    """Return the contexts without one of them."""
    kept = {other: context for other, context in contexts.by_name.items() if other != name}
    return Contexts("" if contexts.used == name else contexts.used, kept)


def _set_values(context: NamedAccess) -> dict[str, str]:
    return {name: value for name, value in context._asdict().items() if value}


def _parse(file: Path, text: str) -> Contexts:
    import yaml  # noqa: PLC0415 - only when there is a file

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _Broken(file, mark.line + 1 if mark else 1, f"this is no YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise _Broken(file, 1, "this is no YAML: it holds characters that no text has") from error
    used, by_name, used_line = "", {}, 1
    for name, node, line in _entries(file, root):
        if name == _USED:
            used, used_line = _text(file, name, node, line), line
        elif name == _CONTEXTS:
            by_name = {key: _context(file, value) for key, value, _ in _entries(file, node)}
        else:
            raise _Broken(file, line, f"{name!r} has no meaning here; there are {_USED} and {_CONTEXTS}")
    if used and used not in by_name:
        raise _Broken(file, used_line, f"there is no context {used} to use")
    return Contexts(used, by_name)


def _context(file: Path, node: Any) -> NamedAccess:
    context = NamedAccess()
    for name, value, line in _entries(file, node):
        if name not in context._fields:
            raise _Broken(file, line, f"{name!r} has no meaning here; there are {', '.join(context._fields)}")
        context = context._replace(**{name: _text(file, name, value, line)})
    return context


def _entries(file: Path, node: Any) -> list[tuple[str, Any, int]]:
    """Return the names in a mapping with their values and lines; an empty one is written as nothing at all."""
    if node is None or (node.id == "scalar" and not node.value):
        return []
    if node.id != "mapping":
        raise _Broken(file, node.start_mark.line + 1, "here stand lines of the form `name: value`")
    found = [(str(key.value), value, key.start_mark.line + 1) for key, value in node.value]
    seen: set[str] = set()
    for name, _, line in found:
        if name in seen:
            raise _Broken(file, line, f"{name} stands here a second time")
        seen.add(name)
    return found


def _text(file: Path, name: str, node: Any, line: int) -> str:
    if node.id != "scalar":
        raise _Broken(file, line, f"{name} is one word or number, not a list")
    return str(node.value)
