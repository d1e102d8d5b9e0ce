"""How a broker makes itself known."""
