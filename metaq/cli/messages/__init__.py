"""Messages and topics: putting, getting, finding, deciding about them."""
