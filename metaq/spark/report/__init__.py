"""The offset report: who is how far behind, as tables, charts and a page."""
