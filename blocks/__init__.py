"""Places: Prefect blocks with fields and secrets, and methods that hand out plain objects of everstep."""
