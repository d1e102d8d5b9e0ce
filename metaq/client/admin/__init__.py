"""Administration of brokers, topics, groups, messages and transactions."""
