"""The ordered index: keys and values in the order of their bytes, derived from the log, by one of two engines."""
