"""Opening and recovering a data folder, and verifying one that no broker uses."""
