"""Sends, as clients write them."""
