"""Topics with priorities: where messages go, and the order in which they are served."""
