"""TINY: a small network on 97 rows, with a journal of what it was trained on. Used by the tests as a file program."""

import json
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn


class Rows(torch.utils.data.Dataset):
    def __init__(self, noisy):
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randn(97, 8, generator=generator)
        self.noisy = noisy

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        noise = torch.zeros(3, dtype=torch.float64)
        if self.noisy:
            noise = torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)
        return index, self.rows[index], noise


class Patience:
    """Says when a metric has not become better `patience` times."""

    def __init__(self, patience):
        self.patience, self.best, self.bad, self.seen = patience, float("inf"), 0, []

    def look(self, value):
        self.bad = 0 if value < self.best else self.bad + 1
        self.best = min(self.best, value)
        self.seen.append(value)

    def state_dict(self):
        return {"best": self.best, "bad": self.bad, "seen": self.seen}

    def load_state_dict(self, state):
        self.best, self.bad, self.seen = state["best"], state["bad"], state["seen"]


class Tiny:
    def __init__(self, config, data):
        torch.manual_seed(config.get("model_seed", 0))
        self.config = config
        self.batch_size = config.get("batch_size", 4)
        self.workers = config.get("workers", 0)
        self.grad_accumulation = config.get("accumulation", 1)
        self.drop_last = config.get("drop_last", False)
        self.clip_norm = config.get("clip")
        self.dataset = Rows(config.get("noisy", False))
        layers = [nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2)]
        if config.get("norm"):
            layers.append(nn.BatchNorm1d(16))
        self.model = nn.Sequential(*layers, nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        warm = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.2, total_iters=5)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 55)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(self.optimizer, [warm, cosine], [5])
        self.patience = Patience(config.get("patience", 10**9))
        self.state = {"patience": self.patience}
        self.journal = Path(config["journal"]) / f"{os.environ['RANK']}.jsonl" if "journal" in config else None
        self.note({"start": os.getpid()})

    def note(self, row):
        if self.journal:
            with self.journal.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def loss(self, batch):
        ids, rows, noise = batch
        if self.model.training:
            self.dump()
            step = self.scheduler.last_epoch + 1
            self.note(
                {"step": step, "ids": ids.tolist(), "noise": [[one.hex() for one in row] for row in noise.tolist()]}
            )
            time.sleep(self.config.get("sleep", 0.0))
            if ids.tolist()[0] == self.config.get("fail_at_id"):
                raise ZeroDivisionError("the row is bad")
        target = rows.sum(dim=1, keepdim=True)
        return ((self.model(rows + noise[:, :1].float()) - target) ** 2).mean()

    def dump(self):
        """Once, before the first step: the state of the helpers."""
        path = self.config.pop("dump", None)
        if path:
            state = {
                "patience": self.patience.state_dict(),
                "scheduler": repr(self.scheduler.state_dict()),
                "exp_avg": self.optimizer.state_dict()["state"][0]["exp_avg"].tolist(),
            }
            Path(path).write_text(json.dumps(state))

    def evaluate(self):
        time.sleep(self.config.get("evaluate_sleep", 0.0))
        values = self.model(self.dataset.rows)
        value = 1.0 if self.config.get("flat") else values.pow(2).mean().item()
        if self.config.get("draws"):
            torch.rand(3), np.random.rand(), random.random()
        self.patience.look(value)
        return {"score": value, "rows": len(values)}

    def done(self):
        return self.patience.bad >= self.patience.patience


def build(config, data):
    time.sleep(config.get("build_sleep", 0.0))
    if "raises" in config:
        raise KeyError(config["raises"])
    return Tiny(config, data)


not_callable = 3
