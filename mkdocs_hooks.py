"""Make a site of documents that are written to be read on GitHub: mkdocs calls this, as mkdocs.yml tells it to.

The site holds all that its pages link to, so nobody needs the network to read on: README.md is its first page, and files
outside of docs are copied beside the pages. Links are written for where a page lies in the project; here they are made those of
the site.
"""

import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parent
DOCS: Final = ROOT / "docs"
README: Final = ROOT / "README.md"
BENCHMARKS: Final = ROOT / "benchmarks"
FIRST_PAGE: Final = "index.md"
_ROW: Final = re.compile(r"^\|.*$", re.MULTILINE)
_CODE: Final = re.compile(r"`[^`\n]*`")
_LINK: Final = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)(?=[)#])")


def on_config(config: MkDocsConfig) -> None:
    """Replace a folder in the navigation by its pages."""
    config.nav = _filled(config.nav)


def _filled(entry: Any) -> Any:
    if isinstance(entry, list):
        return [_filled(one) for one in entry]
    if isinstance(entry, dict):
        return {title: _filled(value) for title, value in entry.items()}
    if not entry.endswith("/"):
        return entry
    folder = next(base / entry for base in (DOCS, ROOT) if (base / entry).is_dir())
    return [_place(path) for path in sorted(folder.rglob("*.md"), key=lambda path: (path.name != README.name, path))]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the first page, the results of benchmarks, and the files outside of docs that pages link to, added ones, too."""
    waiting = [README, *BENCHMARKS.rglob("*.md")]
    waiting += [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path is not None]
    seen = set[Path]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if not path.is_relative_to(DOCS):
            files.append(File.generated(config, _place(path), abs_src_path=str(path)))
        if path.suffix == ".md":
            waiting += [
                target for link in _LINK.findall(path.read_text("utf-8")) if (target := _target(path, link)) is not None
            ]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text of a page with its links as on the site, and bars within code in tables as mkdocs reads them."""
    assert page.file.abs_src_path is not None, "pages are files"
    source = Path(page.file.abs_src_path)
    folder = posixpath.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = _target(source, link[0])
        return link[0] if target is None else posixpath.relpath(_place(target), folder or ".")

    return _ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), _LINK.sub(moved, markdown))


def _target(source: Path, link: str) -> Path | None:
    """Return the file of this project that a link leads to, or None: mkdocs says what is wrong with others."""
    target = (source.parent / link).resolve()
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def _place(path: Path) -> str:
    """Return where a file of this project is on the site."""
    return FIRST_PAGE if path == README else path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()
