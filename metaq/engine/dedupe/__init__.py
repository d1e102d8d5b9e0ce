"""Idempotent producers: a message whose id was stored within the window of its topic is answered, and not stored again."""
