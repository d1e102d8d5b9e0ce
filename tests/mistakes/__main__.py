"""Plays all mistakes, and writes the answers that there are into `mistakes.txt`: read what has changed before you commit it."""

import sys
import tempfile
import time
from pathlib import Path

from tests.mistakes.play import played
from tests.mistakes.table import FILE, written

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        text, answers = FILE.read_text("utf-8"), []
        for _, found in played(Path(folder)):
            print(time.strftime("%T"), found.typed, file=sys.stderr, flush=True)
            answers.append(found)
            FILE.write_text(written(text, answers), "utf-8")
