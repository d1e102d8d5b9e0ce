"""``python -m metaq``: the same as the ``metaq`` command."""

from metaq.cli import main

main()
