"""One replica of a broker: its role, its work as master or slave, and the orders of operators."""
