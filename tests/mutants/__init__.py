"""Lines that are broken on purpose, and the test that must notice each."""
