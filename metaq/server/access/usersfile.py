"""Reading and writing the users file (``metaq.server.access.users``), which is YAML and readable by its owner alone."""

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from metaq.configfile import WRONG_VALUES
from metaq.errors import ConfigError
from metaq.fields import WrongFields, declare, from_values
from metaq.reasons import reason_of
from metaq.server.access.permissions import ANONYMOUS
from metaq.server.access.users import User, is_name, written_permission


@dataclass(frozen=True, kw_only=True)
class _UsersFile:
    users: dict[str, User] = declare({}, description="the users by name")

    def __post_init__(self) -> None:
        for name, user in self.users.items():
            if not is_name(name):
                raise ValueError("a user's name must have 1 to 64 letters, digits, . _ and -")
            has_proof = user.secret is not None or user.password is not None
            if name == ANONYMOUS and (has_proof or user.admin):
                raise ValueError(f"{ANONYMOUS} means clients without a login: it cannot have a secret, a password or admin")
            if name != ANONYMOUS and not has_proof:
                raise ValueError(f"{name} has neither a secret nor a password")


def load_users(path: Path) -> dict[str, User]:
    """Return the users in the file. Raise ``ConfigError`` with what is wrong; the message never contains a secret."""
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
    except OSError as error:
        raise ConfigError(f"users_file {path}: cannot be read: {reason_of(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"users_file {path}: cannot be read: it is no text in UTF-8") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"users_file {path}: others can read it, and it has secrets: chmod 600 {path}")
    try:
        content = _content(text)
    except yaml.MarkedYAMLError as error:  # the error's own text would quote the line, which may contain a secret
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ConfigError(
            f"users_file {path}{line}: not YAML; put a secret in quotes if it has characters other than letters"
        ) from None
    except yaml.YAMLError:
        raise ConfigError(f"users_file {path}: not YAML") from None
    except RecursionError:
        raise ConfigError(f"users_file {path}: not a users file: nested too deeply") from None
    except WRONG_VALUES:  # their text would quote the value
        raise ConfigError(
            f"users_file {path}: a value is not the date, number or the like that YAML takes it for; put a secret in quotes"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"users_file {path}: {error}") from None
    try:
        if not isinstance(content, Mapping | None):
            raise ConfigError(f"users_file {path}: not a users file: it should have `users:` with names below it")
        return from_values(_UsersFile, content or {}).users
    except WrongFields as error:
        raise ConfigError(f"users_file {path}: {error}") from None


def _content(text: str) -> Any:
    """Parse the YAML. Raise ``ConfigError`` when a user, or any other key, appears twice."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        _check_once(node)
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _check_once(node: yaml.Node | None) -> None:
    """Raise ``ConfigError`` for a repeated key: YAML would silently take the last one."""
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise ConfigError(f"line {line} has the same name as line {lines[name]}")
            lines[name] = line
            _check_once(value)


def save_users(path: Path, users: Mapping[str, User]) -> None:
    """Replace the file as a whole, readable by its owner only. Raise ``ConfigError`` when it cannot be written."""
    content = {"users": {name: _row(user) for name, user in users.items()}}
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                _keep_owner(file.fileno(), path)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        raise ConfigError(f"users_file {path}: cannot be written: {error}") from error


def _keep_owner(handle: int, path: Path) -> None:
    """Keep the owner of the file, so that the broker can still read it after an administrator has edited it."""
    if path.exists():
        before = path.stat()
        if before.st_uid != os.geteuid():
            os.fchown(handle, before.st_uid, before.st_gid)


@contextlib.contextmanager
def editing(path: Path) -> Iterator[dict[str, User]]:
    """Yield the users in the file, or none when there is no file, and save them as the block leaves them.

    Other processes wait meanwhile. Raise ``ConfigError``.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"users_file {path}: its folder cannot be opened: {error}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        users = load_users(path) if path.exists() else {}
        yield users
        save_users(path, users)
    finally:
        os.close(folder)


def _row(user: User) -> dict[str, Any]:
    """Return what the file says of a user: what differs from the defaults."""
    grants = {"topics": user.topics, "groups": user.groups}
    row: dict[str, Any] = {"secret": user.secret, "password": user.password, "admin": user.admin}
    row |= {name: {each: written_permission(right) for each, right in rights.items()} for name, rights in grants.items()}
    return {name: value for name, value in row.items() if value}
