"""Handwritten digits: a small network on the 1,797 images of 8 x 8 pixels that scikit-learn ships.

`python -m everstep.programs.digits FOLDER` writes the data set; `build` makes the training program.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from everstep.trainer.program import Program

HELD_OUT = 297
"""Images that are never trained on: the last ones of a fixed permutation."""


def write(folder: Path) -> None:
    """Write the data set as two NumPy files: images (1797, 64) float32 in 0..1, labels (1797,) int64."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(labels))
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "images.npy", (images[order] / 16).astype(np.float32), allow_pickle=False)
    np.save(folder / "labels.npy", labels[order].astype(np.int64), allow_pickle=False)


def build(config: dict[str, float], data: Path) -> Program:
    """A two-layer network with dropout. `config`: width, dropout, lr, batch_size."""
    images = torch.from_numpy(np.load(data / "images.npy", allow_pickle=False))
    labels = torch.from_numpy(np.load(data / "labels.npy", allow_pickle=False))
    width = int(config.get("width", 128))
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(config.get("dropout", 0.2)), nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.get("lr", 2e-3))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        image, label = batch
        return nn.functional.cross_entropy(model(image), label)

    def evaluate() -> dict[str, float]:
        device = next(model.parameters()).device
        guess = model(images[-HELD_OUT:].to(device)).argmax(dim=1).cpu()
        return {"accuracy": (guess == labels[-HELD_OUT:]).double().mean().item()}

    return Program(
        model=model,
        optimizer=optimizer,
        dataset=TensorDataset(images[:-HELD_OUT], labels[:-HELD_OUT]),
        batch_size=int(config.get("batch_size", 50)),
        loss=loss,
        evaluate=evaluate,
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]))
