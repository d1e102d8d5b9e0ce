"""The REST API of a broker: HTTP requests become calls of services, their rows become JSON."""
