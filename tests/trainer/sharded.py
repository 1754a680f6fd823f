"""SHARDED: TINY with a model that `fully_shard` cuts over all ranks, or parts of it, or not at all."""

import torch
from tiny import Tiny
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard


class Net(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(8, 15)
        self.norm = nn.BatchNorm1d(15) if config.get("norm") else nn.Identity()
        self.again = nn.Linear(15, 15, bias=False)
        if config.get("tied"):
            self.same = nn.Linear(15, 15, bias=False)
            self.same.weight = self.again.weight
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(15, 1)
        self.scale = Scale()

    def forward(self, rows):
        seen = self.drop(self.again(torch.relu(self.norm(self.inner(rows)))))
        if hasattr(self, "same"):
            seen = seen + self.same(seen)
        return self.scale(self.out(seen))


class Scale(nn.Module):
    """Complex: FSDP wants one dtype in a group."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.tensor([1 + 0.5j, 0.2 - 0.1j, 0.1j]))

    def forward(self, seen):
        return seen * (self.by.real.sum() + self.by.imag.sum())


def shard(model, config):
    how = config.get("shard", "all")
    if how == "none":
        return
    more = {}
    if how == "columns":  # along the second dimension where there is one that can be cut evenly
        more = {"shard_placement_fn": lambda one: Shard(1) if one.ndim == 2 and one.shape[1] % 4 == 0 else Shard(0)}
    if how != "some":
        fully_shard(model.again)
    fully_shard(model.inner, **more)
    fully_shard(model.scale)
    if how not in ("some", "inner"):
        fully_shard(model, **more)


class Average:
    """An exponential moving average of the weights, cut as they are."""

    def __init__(self, model):
        self.values = {name: one.detach().clone() for name, one in model.state_dict().items()}

    def update(self, model):
        with torch.no_grad():
            for name, one in model.state_dict().items():
                self.values[name].lerp_(one, 0.1) if one.is_floating_point() else self.values[name].copy_(one)

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, state):
        assert state.keys() == self.values.keys()
        for name, one in state.items():
            self.values[name].copy_(one)


class Sharded(Tiny):
    def __init__(self, config, data):
        super().__init__(config, data)
        torch.manual_seed(0)
        self.model = Net(config)
        shard(self.model, config)
        self.optimizer = self.made(config)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 60)
        if config.get("average"):
            self.state["average"] = Average(self.model)
        if config.get("scaler"):
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7)

    def made(self, config):
        if config.get("optimizer") == "sgd":
            return torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2, amsgrad=True)

    def loss(self, batch):
        found = super().loss(batch)
        if self.model.training and "average" in self.state:
            self.state["average"].update(self.model)
        return found


def build(config, data):
    return Sharded(config, data)
