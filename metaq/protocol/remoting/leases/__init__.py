"""The requests by which consumers of RocketMQ 5 lease messages one by one: headers, receipts and acks."""
