"""The queue of each partition: where its messages are in the log."""
