"""Bundled training programs that double as examples."""
