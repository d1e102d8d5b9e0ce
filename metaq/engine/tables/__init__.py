"""What the broker knows in memory: topics, groups and their members, offsets, locks."""
