"""docs/rest.md has the operations that there are."""

from tests.docs.rest import PAGE, written


def test_the_table_of_operations_is_made_of_them() -> None:
    """E-32: ``python -m tests.docs.rest`` writes it."""
    text = PAGE.read_text("utf-8")
    assert written(text) == text
