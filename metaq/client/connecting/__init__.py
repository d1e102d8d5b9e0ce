"""Connections to brokers and registries, and what all parts of a client share."""
