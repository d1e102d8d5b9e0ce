"""Consume queues: for each partition, where its messages are in the log."""
