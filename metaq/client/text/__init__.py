"""The text protocol for Python programs."""
