"""Reading a partition for a consumer: its filter, and the messages that match."""
