"""Benchmarks of metaq beside other brokers on the same machine in the same run: `python -m benchmarks --help`."""
