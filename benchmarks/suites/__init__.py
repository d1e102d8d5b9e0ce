"""The suites of benchmarks, one in each module; each has `run(bench) -> Report`."""
