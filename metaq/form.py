"""The form in which the hot modules run: compiled to extensions, or interpreted (docs/packaging.md)."""

from importlib.util import find_spec
from typing import Final

FORM: Final = "interpreted" if find_spec("metaq.compiled__mypyc") is None else "compiled"
"""All modules that can be compiled are, or none: one extension holds them."""
