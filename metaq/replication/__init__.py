"""Replication: a master's log is copied to its slaves, and the replicas elect the master."""
