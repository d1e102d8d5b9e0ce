"""Where brokers and topics are: the tables of a registry, which RocketMQ calls a name server."""
