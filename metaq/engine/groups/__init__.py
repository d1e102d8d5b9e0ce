"""Consumer groups: which there are, who is in them, which queues their members have."""
