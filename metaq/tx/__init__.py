"""Transactions: branches, the marks in the log that they are made of, and half messages."""
