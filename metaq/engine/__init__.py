"""The broker without sockets: topics, groups, offsets, and what becomes of a message in one turn."""
