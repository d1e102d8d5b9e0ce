"""Sending messages, and waiting for replies to them."""
