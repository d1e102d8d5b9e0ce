"""A message broker in one process, spoken to over a line protocol that a person can type."""

__version__ = "0.1.0"
