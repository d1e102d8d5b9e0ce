"""Timers: messages that are delivered at a time of their own, whatever its distance."""
