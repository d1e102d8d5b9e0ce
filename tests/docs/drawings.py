"""The drawings of docs, made from text: python -m tests.docs.drawings

Each docs/drawings/NAME.txt becomes docs/images/NAME.svg. A line of it is one of

    box NAME COLUMN ROW TEXT      a box; `/` begins a new line, the first of which is bold
    arrow FROM TO TEXT            an arrow between two boxes; the text stands beside its middle
    dashed FROM TO TEXT           one that is drawn with dashes

Columns and rows are numbers and may have decimals.
"""

from pathlib import Path
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from tests.docs.examples import ROOT

SOURCES: Final = ROOT / "docs" / "drawings"
IMAGES: Final = ROOT / "docs" / "images"
COLUMN: Final = 220
ROW: Final = 100
BOX: Final = (160, 56)
MARGIN: Final = 10
LINE: Final = 16
BOLD: Final = ' class="name"'
_HEAD: Final = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">
<title>{title}</title>
<style>text {{ font: 13px sans-serif; text-anchor: middle; fill: #222 }} .name {{ font-weight: bold }}
.label {{ font-size: 12px; paint-order: stroke; stroke: #fff; stroke-width: 4px }}
rect {{ fill: #e8f3f1; stroke: #00796b }} line {{ stroke: #555; stroke-width: 1.5 }}</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>
<rect width="100%" height="100%" style="fill: #fff; stroke: none"/>
"""


class Box(NamedTuple):
    """A box by its middle, and its lines of text."""

    x: float
    y: float
    lines: list[str]

    def edge(self, to: "Box") -> tuple[float, float]:
        """Return where the line from the middle of this box to that of another one leaves this box."""
        dx, dy = to.x - self.x, to.y - self.y
        part = min(size / 2 / abs(way) for size, way in zip(BOX, (dx, dy), strict=True) if way)
        return self.x + dx * part, self.y + dy * part


def drawn(source: str) -> str:
    """Return the SVG of a drawing, whose first line is its title."""
    title, *lines = source.splitlines()
    boxes: dict[str, Box] = {}
    shapes: list[str] = []
    for line in filter(None, lines):
        kind, *words = line.split()
        if kind == "box":
            name, column, row, *text = words
            x, y = MARGIN + BOX[0] / 2 + float(column) * COLUMN, MARGIN + BOX[1] / 2 + float(row) * ROW
            boxes[name] = Box(x, y, [part.strip() for part in " ".join(text).split("/")])
        else:
            begin, end, *text = words
            shapes += _arrow(boxes[begin], boxes[end], " ".join(text), kind)
    width = max(box.x for box in boxes.values()) + BOX[0] / 2 + MARGIN
    height = max(box.y for box in boxes.values()) + BOX[1] / 2 + MARGIN
    frames = [shape for box in boxes.values() for shape in _frame(box)]
    head = _HEAD.format(width=width, height=height, title=escape(title.lstrip("# ")))
    return head + "\n".join([*frames, *shapes, "</svg>\n"])


def _frame(box: Box) -> list[str]:
    width, height = BOX
    top = box.y - (len(box.lines) - 1) * LINE / 2 + 4
    texts = [
        f'<text x="{box.x:g}" y="{top + number * LINE:g}"{"" if number else BOLD}>{escape(line)}</text>'
        for number, line in enumerate(box.lines)
    ]
    return [f'<rect x="{box.x - width / 2:g}" y="{box.y - height / 2:g}" width="{width}" height="{height}" rx="6"/>', *texts]


def _arrow(begin: Box, end: Box, text: str, kind: str) -> list[str]:
    (x1, y1), (x2, y2) = begin.edge(end), end.edge(begin)
    dashes = ' stroke-dasharray="5 4"' if kind == "dashed" else ""
    label = f'<text class="label" x="{(x1 + x2) / 2:g}" y="{(y1 + y2) / 2 - 5:g}">{escape(text)}</text>'
    return [f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" marker-end="url(#tip)"{dashes}/>', label]


def drawings() -> dict[Path, str]:
    """The pictures as they are to be, by their files."""
    return {IMAGES / f"{path.stem}.svg": drawn(path.read_text("utf-8")) for path in sorted(SOURCES.glob("*.txt"))}


def main() -> None:
    for path, picture in drawings().items():
        path.write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
