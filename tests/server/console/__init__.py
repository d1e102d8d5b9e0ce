"""The console in the browser."""
