"""The broker without sockets: topics, groups, offsets, and the way of a message into the log."""
