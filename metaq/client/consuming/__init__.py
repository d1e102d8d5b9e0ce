"""Reading messages: consumers of groups, and of chosen queues."""
