"""A file system with a limit, which needs root, as in CI."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")


@contextmanager
def small_disk(folder: Path, *options: str) -> Iterator[Path]:
    """Mount one at a new folder; ``options`` are those of tmpfs."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
