"""Connections: the first byte, the bytes in and out, TLS, what they hold and how long they may work."""
