"""Consumers: members of groups, and readers of chosen queues."""
