"""The numerics: no web, no database, no queue."""
