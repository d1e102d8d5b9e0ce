"""The client library for asyncio."""
