"""The broker's tables in memory: topics, groups and their members, offsets, locks."""
