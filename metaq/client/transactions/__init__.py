"""Transactional messages: with a local transaction, or in a branch of a global one."""
