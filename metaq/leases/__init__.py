"""Leases: messages that are given to one consumer of a group for a time, and given again when that ends."""
