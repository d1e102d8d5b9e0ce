"""The wire and record formats: bytes to commands and back, without sockets, files, clocks, threads or logs."""
