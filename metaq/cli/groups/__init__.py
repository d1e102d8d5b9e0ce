"""Consumer groups: how far they are, what they failed to consume."""
