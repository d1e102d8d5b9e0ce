"""PURE: the name that a person may have meant."""

from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean …?`` with the known name that is most like another one; nothing when none is like it."""
    import difflib  # noqa: PLC0415 - only for a mistake

    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""
