"""Transactions: XA and local branches, the marks in the log that record them, and half messages."""
