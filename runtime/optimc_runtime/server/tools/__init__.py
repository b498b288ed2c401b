"""Tool calls: how models write them, and how the API does."""
