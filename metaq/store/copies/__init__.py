"""The logs of other replicas: which parts are the same, taking one over, discarding one's own."""
