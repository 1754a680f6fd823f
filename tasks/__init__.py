"""Policy: how Prefect treats each piece of work."""
