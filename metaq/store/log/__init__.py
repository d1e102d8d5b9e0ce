"""The commit log, and what of it is kept."""
