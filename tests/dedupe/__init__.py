"""Tests of the ids of messages, without a broker."""
