"""Leased messages: each is given to one consumer for a time, and again unless it is finished until then."""
