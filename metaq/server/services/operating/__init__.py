"""Services for operators beside those of messages and groups: the cluster, the history, the log, users, threads."""
