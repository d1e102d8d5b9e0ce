"""Mistakes that people make on the command line, each with the exact answer that they get."""
