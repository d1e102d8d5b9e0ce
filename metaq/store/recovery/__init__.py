"""Opening a data folder, and checking one that no broker uses."""
