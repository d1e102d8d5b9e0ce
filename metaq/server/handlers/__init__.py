"""Command → function, one module per family of commands."""
