"""Deployment of brokers and registries to several machines, which ``fabfile.py`` calls, and systemd units."""
