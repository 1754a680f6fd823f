"""A program with everything that may be stateful: tied weights, buffers, scaler, averages, its own loader."""

import copy
import os

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.rare = nn.Linear(4, 4)
        self.never = nn.Linear(2, 2)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.words.weight
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("spin", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flag", torch.tensor(False))
        self.to(memory_format=torch.channels_last)

    def forward(self, ids):
        seen = self.words(ids)
        square = self.norm(self.conv(seen.view(len(ids), 1, 2, 4)))
        if (ids == 5).any():
            square = square + self.rare(square.mean((2, 3)))[:, :, None, None]
        if self.training:
            self.count += 1
            self.spin += torch.rand(2, dtype=torch.complex64)
        return self.out(seen + square.sum(1).reshape(len(ids), 8))


class Average:
    """An exponential moving average of the weights."""

    def __init__(self, model):
        self.model = copy.deepcopy(model)

    def update(self, model):
        with torch.no_grad():
            for mine, other in zip(self.model.parameters(), model.parameters(), strict=True):
                mine.lerp_(other, 0.1)

    def state_dict(self):
        return self.model.state_dict()

    def load_state_dict(self, state):
        self.model.load_state_dict(state)


class Stream:
    """A loader of this rank's batches, which knows where it stands."""

    def __init__(self, rank, length):
        self.rank, self.length, self.at, self.rounds = rank, length, 0, 0

    def __iter__(self):
        while self.at < self.length:
            self.at += 1
            generator = torch.Generator().manual_seed(1000 * self.rank + 100 * self.rounds + self.at)
            yield torch.randint(0, 11, (6,), generator=generator)
        self.at, self.rounds = 0, self.rounds + 1

    def state_dict(self):
        return {"at": self.at, "rounds": self.rounds}

    def load_state_dict(self, state):
        self.at, self.rounds = state["at"], state["rounds"]


class Rich:
    def __init__(self, config):
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=torch.tensor(1e-2), amsgrad=True, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [8, 15, 15])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7)
        self.clip_norm = 1.0
        self.average = Average(self.model)
        self.state = {"average": self.average}
        self.batch_size = 12
        if config.get("loader"):
            self.loader = Stream(int(os.environ["RANK"]), 7)
        else:
            self.dataset = torch.utils.data.TensorDataset(torch.arange(50) % 11)

    def loss(self, batch):
        ids = batch[0] if isinstance(batch, list) else batch
        if self.model.training:
            self.average.update(self.model)
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.cross_entropy(self.model(ids).float(), (ids * 3) % 11)


def build(config, data):
    return Rich(config)
