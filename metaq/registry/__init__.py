"""The routes of brokers and topics: the tables of a registry, which RocketMQ calls a name server."""
