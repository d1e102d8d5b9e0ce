"""The probe of a machine: run there by its own Python, as ``python3 -c SOURCE QUESTIONS``; it changes nothing.

It has to run on any Python 3, however old, and prints one line of JSON.
"""

import json
import os
import pathlib
import pwd
import resource
import socket
import sys
import sysconfig


def nearest(path: str) -> str:
    """Return the path, or its nearest parent that exists; maybe a link whose target does not."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def folder(path: str) -> "dict[str, object]":
    """Return whether a folder can be made or used, and how much room there is."""
    there = nearest(path)
    problem = None
    if not os.path.exists(there):
        problem = there + " is a link to " + os.readlink(there) + ", which does not exist; create it, or remove the link"
        there = os.path.dirname(there)
    elif not os.path.isdir(there):
        problem = there + " is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = "no permission to write into " + there
    space = os.statvfs(there)
    return {
        "path": path,
        "problem": problem,
        "device": os.stat(there).st_dev,
        "free": space.f_bavail * space.f_frsize,
        "empty": there != path or (os.path.isdir(path) and os.access(path, os.R_OK) and not os.listdir(path)),
    }


def taken(host: str, port: int) -> "str | None":
    """Return why no process can listen there now, or ``None``."""
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen(1)
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    finally:
        probe.close()
    return None


def user_problem(name: str) -> "str | None":
    """Return why services cannot run as a user, or ``None``."""
    if not name:
        return None
    try:
        pwd.getpwnam(name)
    except KeyError:
        return "there is no user " + name + "; make it with useradd --system"
    return None


def read(path: str) -> str:
    """Return a file's text; empty when it cannot be read."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def link(path: str) -> str:
    """Return the release that a link leads to; empty when there is no link."""
    return os.path.basename(os.readlink(path)) if os.path.islink(path) else ""


def normal(path: str) -> str:
    """Return a path as settings have it, by which it is looked up."""
    return str(pathlib.PurePosixPath(path))


def configuration(home: str) -> "dict[str, str]":
    """Return the configuration files of a release, by kind."""
    return {kind: read(os.path.join(home, "conf", kind + ".yaml")) for kind in ("broker", "registry")}


def main() -> None:
    """Answer the questions with one line of JSON."""
    asked = json.loads(sys.argv[1])
    home = asked["folder"]
    folder_of_releases = os.path.join(home, "releases")
    names = os.listdir(folder_of_releases) if os.path.isdir(folder_of_releases) else []
    paths = {name: os.path.join(folder_of_releases, name) for name in names}
    complete = {name: read(os.path.join(path, "complete")) for name, path in paths.items()}
    found = [name for name in names if complete[name]]
    configurations = {name: configuration(paths[name]) for name in found}
    data = set(asked["data"])
    for texts in configurations.values():
        for text in texts.values():
            data.update(normal(json.loads(line[len("data: ") :])) for line in text.splitlines() if line.startswith("data: "))
    facts = {
        "python": list(sys.version_info[:2]),
        "platform": sysconfig.get_platform(),
        "root": os.geteuid() == 0,
        "systemd": os.path.isdir("/run/systemd/system"),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "user_problem": user_problem(asked["user"]),
        "home": folder(home),
        "data": [folder(path) for path in asked["data"]],
        "formats": {path: read(os.path.join(path, "store.json")) for path in data},
        "taken": [[host, port, taken(host, port)] for host, port in asked["addresses"]],
        "releases": sorted(found, key=lambda name: os.stat(os.path.join(paths[name], "complete")).st_mtime),
        "complete": complete,
        "configurations": configurations,
        "current": link(os.path.join(home, "current")),
        "previous": link(os.path.join(home, "previous")),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
