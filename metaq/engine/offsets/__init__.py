"""The consumer offsets of groups: kept in the log, recorded over time, and exported."""
