"""HTTP, persistence, storage, command line. Never torch."""
