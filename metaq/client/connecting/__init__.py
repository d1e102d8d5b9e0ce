"""Connections to brokers and registries, and the core that all parts of a client share."""
