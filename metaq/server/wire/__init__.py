"""Connections: protocol detection, bytes in and out, TLS, limits of memory and of time."""
