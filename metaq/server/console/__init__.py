"""The console: pages of a broker for people, over the services that the API has too."""
