"""The child: one process a rank, which runs the user's program. Imports torch, everstep.core and everstep.store only."""
