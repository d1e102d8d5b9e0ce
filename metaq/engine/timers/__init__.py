"""Delayed messages of any length: parked, delivered, cancelled, and kept while the log ages."""
