"""Everything that the first step needs is imported, and done once, before a rank is told what to train.

PyTorch imports parts of itself at first use: an optimizer's first moments cost about two seconds.
"""

import torch

import everstep.trainer.rank  # noqa: F401 - for all that it imports


def up() -> None:
    """Train a tiny model for a step and forget it. Leaves no thread pool behind that a fork could not bear."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    model(torch.ones(1, 2)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.load_state_dict(optimizer.state_dict())
