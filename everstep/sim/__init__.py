"""Stand-ins that ship: what drills and tests use in place of rare faults."""
