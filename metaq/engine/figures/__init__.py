"""The broker's figures: counters since the start, statistics over time, and metrics."""
