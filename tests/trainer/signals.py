"""SIGNALS: TINY with one rank that may be slow, a note of the norm that the optimizer sees, and a step that blows up."""

import os
import time

import torch
from tiny import Tiny


class Signals(Tiny):
    def __init__(self, config, data):
        super().__init__(config, data)
        if config.get("norms"):
            self.optimizer.register_step_pre_hook(lambda *_: self.note({"norm": self.norm().hex()}))
        if config.get("scaler"):
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def norm(self):
        """The way it would be written by hand."""
        parts = [one.grad.norm() for one in self.model.parameters() if one.grad is not None]
        return torch.stack(parts).norm().item()

    def loss(self, batch):
        value = super().loss(batch)
        if self.model.training and int(os.environ["RANK"]) == self.config.get("slow_rank"):
            time.sleep(self.config["slow"])
        if self.model.training and self.scheduler.last_epoch + 1 >= self.config.get("blows_up_at", 10**9):
            value = value * float("nan")
        return value


def build(config, data):
    return Signals(config, data)
