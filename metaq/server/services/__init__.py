"""What users of the HTTP port ask of this broker, as typed rows: the API writes them as JSON, pages as HTML."""
