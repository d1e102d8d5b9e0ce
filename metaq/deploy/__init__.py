"""Deploying brokers and registries on several machines: what ``fabfile.py`` calls, and systemd units."""
