"""Training programs that stamp the clock: where a step begins and where it ends, as the user's code sees it.

A step begins when `loss` is called and ends when the scheduler, which is last in a step, has been called. Stamps are
monotonic seconds (the same clock in every process of a machine) and are appended to `config["stamps"]`, one line a
step: rank, pid, step, begin, end. A line is written when the next step begins, after its stamp is taken.
"""

import os
import time

import torch
from torch import nn

from everstep.trainer.program import Program

SAMPLES = 1024
BLOCK = 100


class Clock:
    """Stands where a scheduler would: it is called last in a step, and rides in the checkpoint."""

    def __init__(self, path):
        self.step_number = 0
        self._out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._began = self._ended = 0.0

    def begin(self):
        now = time.monotonic()
        if self._ended:
            line = f"{os.environ.get('RANK', '0')} {os.getpid()} {self.step_number} {self._began:.6f} {self._ended:.6f}"
            self.note(line)
        self._began = now

    def note(self, line):
        os.write(self._out, line.encode() + b"\n")

    def step(self):
        self.step_number += 1
        self._ended = time.monotonic()

    def state_dict(self):
        return {"step": self.step_number}

    def load_state_dict(self, state):
        self.step_number = state["step"]


def build(config, data):
    """A linear layer of `inputs` x `outputs` with AdamW. A step sleeps `pause` seconds as one that waits for a GPU, and
    multiplies matrices `products` times as one that does not.
    """
    inputs, outputs = config.get("inputs", 512), config.get("outputs", 512)
    model = nn.Linear(inputs, outputs)
    clock = Clock(config["stamps"])
    pause, products = config.get("pause", 0.0), config.get("products", 0)
    matrix = torch.eye(256)

    def loss(batch):
        if model.training:
            clock.begin()
            time.sleep(pause)
            for _ in range(products):
                torch.mm(matrix, matrix)
        return model(batch[0]).square().mean()

    return Program(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        dataset=torch.utils.data.TensorDataset(torch.ones(SAMPLES, inputs)),
        batch_size=8,
        loss=loss,
        scheduler=clock,
    )


def build_empty(config, data):
    """A step that does next to nothing. Every `BLOCK` steps the same number is taken by a bare loop over a twin.

    One line for each pair of blocks: microseconds a step in the trainer's loop, and in the bare one.
    """
    (model, optimizer), (twin, twins) = _tiny(), _tiny()
    clock, idle = Clock(config["stamps"]), Clock(os.devnull)
    rows = torch.ones(SAMPLES, 1)
    began = 0.0

    def loss(batch):
        nonlocal began
        if model.training and clock.step_number % BLOCK == 0:
            now = time.perf_counter()
            bare = _bare_steps(twin, twins, idle, rows)
            if began:
                clock.note(f"{(now - began) / BLOCK * 1e6:.3f} {bare / BLOCK * 1e6:.3f}")
            began = time.perf_counter()
        return model(batch[0]).square().mean()

    return Program(
        model=model,
        optimizer=optimizer,
        dataset=torch.utils.data.TensorDataset(rows),
        batch_size=8,
        loss=loss,
        scheduler=clock,
    )


def _tiny():
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6)


def _bare_steps(model, optimizer, scheduler, rows):
    """Seconds for `BLOCK` steps as one would write them by hand, the loss read at each."""
    began = time.perf_counter()
    for index in range(BLOCK):
        batch = rows[index * 8 : index * 8 + 8]
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        loss.item()
        optimizer.step()
        scheduler.step()
    return time.perf_counter() - began
