"""Leases: messages that are given to consumers for a while, and again until they are finished."""
