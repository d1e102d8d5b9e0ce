"""Consumer groups: their offsets and lags, and the messages that they failed to consume."""
