"""The unmodified RocketMQ broker as a peer."""
