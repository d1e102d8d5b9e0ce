"""One module a suite; each has `run(bench) -> Report`."""
