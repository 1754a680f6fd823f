"""Places: Prefect blocks with fields and secrets, and methods that hand out plain objects of everstep."""

from blocks.guardrails import Guardrails
from blocks.tiers import StorageTiers
from blocks.tracking import Tracking

__all__ = ["Guardrails", "StorageTiers", "Tracking"]
