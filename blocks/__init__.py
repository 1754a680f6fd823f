"""Places: Prefect blocks with fields and secrets. The first block comes with the object tier."""
