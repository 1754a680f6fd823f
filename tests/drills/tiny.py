"""TINY: 97 rows, a small network with dropout, warm-up and cosine, noise from all three generators, and a journal.

The journal (`EVERSTEP_JOURNAL`, a folder) gets a line a micro-batch: step, ids, learning rate, loss, noise as hex.
"""

import json
import math
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from everstep.trainer.program import Program


class Rows(torch.utils.data.Dataset):
    """97 rows of 8 floats; row i carries id i and noise from torch, NumPy and Python."""

    def __init__(self, data):
        table = np.load(data / "rows.npy", allow_pickle=False)
        self.rows, self.targets = torch.from_numpy(table[:, :8]), torch.from_numpy(table[:, 8:])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        noise = torch.rand(()) + np.random.rand() + random.random()
        return i, self.rows[i] + 0.01 * noise.float(), self.targets[i], noise.double()


class Clock:
    """Counts micro-batches; rides in the checkpoint."""

    def __init__(self):
        self.micro = 0

    def state_dict(self):
        return {"micro": self.micro}

    def load_state_dict(self, state):
        self.micro = state["micro"]


def build(config, data):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    if config.get("ballast"):
        model.register_parameter("ballast", nn.Parameter(torch.ones(config["ballast"])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_cosine)
    clock = Clock()
    pause = float(config.get("pause", 0.0))

    def loss(batch):
        ids, rows, targets, noise = batch
        value = nn.functional.mse_loss(model(rows), targets)
        if config.get("ballast"):
            value = value + 0.01 * model.ballast.square().mean()
        if model.training:
            note(scheduler.last_epoch + 1, ids, optimizer, value, noise)
            clock.micro += 1
            time.sleep(pause)
        return value

    return Program(
        model=model,
        optimizer=optimizer,
        dataset=Rows(data),
        batch_size=config.get("batch_size", 4),
        loss=loss,
        scheduler=scheduler,
        grad_accumulation=config.get("accumulation", 1),
        workers=config.get("workers", 0),
        state={"clock": clock},
        evaluate=lambda: {"bias": model[3].bias.item()},
    )


def warm_up_then_cosine(step):
    return (step + 1) / 5 if step < 5 else 0.5 * (1 + math.cos(math.pi * (step - 5) / 55))


def note(step, ids, optimizer, value, noise):
    folder = os.environ.get("EVERSTEP_JOURNAL")
    if folder is None:
        return
    row = {
        "step": step,
        "pid": os.getpid(),
        "ids": ids.tolist(),
        "lr": optimizer.param_groups[0]["lr"].hex(),
        "loss": value.item().hex(),
        "noise": [one.hex() for one in noise.tolist()],
    }
    with (Path(folder) / f"rank-{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def write_data(folder):
    generator = np.random.Generator(np.random.PCG64(1))
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "rows.npy", generator.standard_normal((97, 9)).astype(np.float32), allow_pickle=False)
