"""The offset report: the lag of every consumer group, as tables, charts and a page."""
