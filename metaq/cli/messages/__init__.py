"""Messages, topics and transactions: to put, get, find and decide them."""
