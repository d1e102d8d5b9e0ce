"""What concerns this machine: running brokers and registries, their settings, users and data."""
