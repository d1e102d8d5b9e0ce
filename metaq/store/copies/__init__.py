"""Logs of other replicas: finding the common part, copying another log, discarding a part of one's own."""
