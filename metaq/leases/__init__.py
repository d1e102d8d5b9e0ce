"""Messages that a group leases one by one: what the log says about them, and the state that follows from it."""
