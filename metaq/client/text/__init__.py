"""The client of the text protocol."""
