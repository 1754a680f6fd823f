"""The child: one process for each rank. Imports torch, everstep.core and everstep.store only, and runs the user's program."""

from everstep.trainer.program import Program

__all__ = ["Program"]
