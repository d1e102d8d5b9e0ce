"""The binary protocol of RocketMQ's clients."""
