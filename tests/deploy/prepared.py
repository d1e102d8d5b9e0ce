"""The ``python3`` of a machine that has installed the same wheels before: it copies what that came to.

An installation takes ten seconds of a processor, and tests of what follows it need one for each host and release. The first
installation of a set of wheels is real. Whatever else is asked of it, the interpreter itself does.

``prepared_python`` writes the script that runs this with the folder of what is kept, and the arguments of ``python3``.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn


def prepared_python(folder: Path) -> Path:
    """Write an executable that stands for ``python3`` and keeps installations in a folder; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"python-{os.getpid()}"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {folder} "$@"\n', "utf-8")
    script.chmod(0o755)
    return script


def _key(words: list[str]) -> str:
    """Return a name for what is installed: the packages, and the wheels to choose from."""
    wheels = Path(words[words.index("--find-links") + 1])
    parts = [word.encode() for word in words[words.index("--find-links") + 2 :]]
    parts += [hashlib.sha256(path.read_bytes()).digest() for path in sorted(wheels.glob("*.whl"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _copy(source: Path, target: Path, path_before: Path, path_after: Path) -> None:
    """Copy an environment; its programs name their interpreter by its path, which changes."""
    shutil.copytree(source, target, symlinks=True)
    before, after = f"#!{path_before}/".encode(), f"#!{path_after}/".encode()
    for program in (target / "bin").iterdir():
        if not program.is_symlink() and (text := program.read_bytes()).startswith(before):
            program.write_bytes(after + text.removeprefix(before))


def _install(folder: Path, words: list[str]) -> int:
    """Do what ``python pip --python ENVIRONMENT/bin/python install`` does; return its exit code."""
    environment = Path(words[words.index("--python") + 1]).parents[1]
    kept = folder / _key(words)
    if kept.exists():
        shutil.rmtree(environment)
        _copy(kept, environment, kept, environment)
        return 0
    code = subprocess.run([sys.executable, *words], check=False).returncode
    if code == 0:
        new = folder / f"{kept.name}.{os.getpid()}"
        _copy(environment, new, environment, kept)
        try:
            new.rename(kept)
        except OSError:  # another process was faster
            shutil.rmtree(new)
    return code


def main() -> NoReturn:
    folder, *words = sys.argv[1:]
    if "--python" in words and "install" in words:
        sys.exit(_install(Path(folder), words))
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main()
