"""``metaq cluster``: brokers and their replicas."""
