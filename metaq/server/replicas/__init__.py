"""One replica of a broker: its role, what it does as master and as slave, and the orders of operators."""
