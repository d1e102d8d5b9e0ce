"""Duplicates: the ids of the messages that were stored lately, so that a message that is sent again is stored once."""
