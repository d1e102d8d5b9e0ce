"""Bytes to commands and back. Pure: no sockets, files, clocks, threads or logs."""
