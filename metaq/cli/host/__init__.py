"""Commands for this machine: running brokers and registries, their settings, users and data."""
