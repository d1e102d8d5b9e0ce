"""What operators look at beside messages and groups: the cluster, the history, the log, and the users."""
