"""Administration: what administrators see and change."""
