"""SHARDED: TINY with a model that `fully_shard` cuts over all ranks, or parts of it, or not at all."""

import os

import torch
from tiny import Tiny
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


class Net(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(8, 15)
        self.norm = nn.BatchNorm1d(15) if config.get("norm") else nn.Identity()
        self.again = nn.Linear(15, 15, bias=False)
        self.wide = (
            nn.Sequential(nn.Linear(15, config["wide"]), nn.Linear(config["wide"], 15)) if "wide" in config else None
        )
        if config.get("tied"):
            self.same = nn.Linear(15, 15, bias=False)
            self.same.weight = self.again.weight
        self.drop = nn.Dropout(config.get("drop", 0.2))
        self.out = nn.Linear(15, 1)
        self.scale = Scale(real=bool(config.get("scaler")))

    def forward(self, rows):
        seen = self.drop(self.again(torch.relu(self.norm(self.inner(rows)))))
        seen = seen + self.same(seen) if hasattr(self, "same") else seen
        seen = seen + self.wide(seen) if self.wide is not None else seen
        return self.scale(self.out(seen))


class Scale(nn.Module):
    """Complex numbers, which a gradient scaler does not take; FSDP wants one dtype in a group."""

    def __init__(self, real):
        super().__init__()
        by = torch.tensor([1 + 0.5j, 0.2 - 0.1j, 0.1j])
        self.by = nn.Parameter(by.real.clone() if real else by)

    def forward(self, seen):
        return seen * torch.view_as_real(self.by).sum() if self.by.is_complex() else seen * self.by.sum()


def shard(model, config):
    how = config.get("shard", "all")
    if how == "none" or (how == "if several" and os.environ["WORLD_SIZE"] == "1"):
        return
    if how == "two dimensions":
        fully_shard(model.inner, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")))
        return
    if how == "by hand":
        model.out = parallelize_module(model.out, init_device_mesh("cpu", (2,)), ColwiseParallel())
        return
    more = {}
    if how == "columns":  # along the second dimension, where it can be cut evenly
        more = {"shard_placement_fn": lambda one: Shard(1) if one.ndim == 2 and one.shape[1] == 8 else Shard(0)}
    if how != "some" and not config.get("tied"):  # FSDP wants tied parameters in one group
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

    def dump(self):
        """Once, before the first step: the whole of weights and moments, which the ranks gather."""
        path = self.config.pop("dump", None)
        if path:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}
            state |= {name: one.state_dict() for name, one in self.state.items() if name == "average"}
            state = gathered(state)
            if os.environ["RANK"] == "0":
                torch.save(state, path)

    def loss(self, batch):
        found = super().loss(batch)
        if self.model.training and "average" in self.state:
            self.state["average"].update(self.model)
        return found


def gathered(state):
    if isinstance(state, dict):
        return {key: gathered(one) for key, one in state.items()}
    return state.full_tensor() if isinstance(state, DTensor) else state


def build(config, data):
    return Sharded(config, data)
