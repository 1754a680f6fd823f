"""A small GPT over bytes: 256 symbols, no tokenizer. Trains on the shards that `everstep.programs.corpus` makes.

`build` makes the training program. What it must beat is a table: the best guess of a byte from the one before it,
counted on the training text (a bigram model). Both are measured on the same held-out bytes, in bits per byte.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from everstep.trainer.program import Program

SYMBOLS = 256
HELD_OUT_WINDOWS = 256
"""So many windows, spread evenly over the held-out text, are looked at in an evaluation."""
BEFORE = 3
SAMPLE_BYTES = 400
PROMPT = b"\ndef "

Bytes = NDArray[np.uint8]


def build(config: dict[str, Any], data: Path) -> Program:
    """Config: layers, width, heads, context (bytes), batch_size (windows), lr, warmup and decay_steps (of the rate)."""
    context, steps = int(config.get("context", 128)), int(config.get("decay_steps", 1000))
    model = GPT(int(config.get("layers", 4)), int(config.get("width", 128)), int(config.get("heads", 4)), context)
    train, held = Windows(data, "train", context), Windows(data, "held", context)
    chosen = torch.stack([held[len(held) * place // HELD_OUT_WINDOWS] for place in range(HELD_OUT_WINDOWS)])
    bigram = bits_of_bigram(count_pairs(train.shards), chosen)
    optimizer = torch.optim.AdamW(_groups(model), lr=float(config.get("lr", 2e-3)), betas=(0.9, 0.95))
    warmup = int(config.get("warmup", 50))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, warmup, steps))

    def loss(batch: Tensor) -> Tensor:
        return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    measured: dict[str, float] = {}

    def evaluate() -> dict[str, float]:
        device = next(model.parameters()).device
        losses = [loss(part.to(device)).item() for part in torch.split(chosen, 32)]
        measured.update(bits_per_byte=sum(losses) / len(losses) / math.log(2), bigram_bits_per_byte=bigram)
        return measured

    def show() -> str:
        return _comparison(measured, chosen[:, 1:].numel()) + go_on(model)

    return Program(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        dataset=train,
        collate=torch.stack,
        batch_size=int(config.get("batch_size", 32)),
        loss=loss,
        clip_norm=1.0,
        evaluate=evaluate,
        show=show,
    )


class GPT(nn.Module):
    """Decoder-only transformer, pre-norm, learned positions. Bytes (batch, time) in, logits (batch, time, 256) out.

    The `BEFORE` bytes before each are looked up as well: short patterns need not wait until attention has learnt to look
    back, which saves half of the steps.
    """

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.symbols = nn.Embedding(SYMBOLS, width)
        self.before = nn.ModuleList(nn.Embedding(SYMBOLS, width) for _ in range(BEFORE))
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, SYMBOLS, bias=False)
        for name, one in self.named_parameters():
            if one.dim() == 2:
                residual = name.endswith(("join.weight", "down.weight"))
                nn.init.normal_(one, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.symbols(text) + self.places.weight[: text.shape[1]]
        for back, table in enumerate(self.before, start=1):
            hidden = hidden + table(functional.pad(text, (back, 0))[:, : text.shape[1]])
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Block(nn.Module):
    """Attention to what came before, then a two-layer network; each added to what it was given."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.split = nn.Linear(width, 3 * width, bias=False)
        self.join = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, time, width = hidden.shape
        parts = self.split(self.first(hidden)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.join(seen.transpose(1, 2).reshape(batch, time, width))
        added: Tensor = hidden + self.down(functional.gelu(self.up(self.second(hidden))))
        return added


class Windows(Dataset[Tensor]):
    """Windows of `context` + 1 bytes, side by side, of the memory-mapped shards `<split>-*.bin`. Int64 tensors."""

    def __init__(self, data: Path, split: str, context: int) -> None:
        self.context = context
        self.shards = [np.memmap(path, np.uint8, "r") for path in sorted(data.glob(f"{split}-*.bin"))]
        counts = [(len(shard) - 1) // context for shard in self.shards]
        self._ends = np.cumsum(counts, dtype=np.int64)
        if not self.shards or not self._ends[-1]:
            raise ValueError(
                f"data.source: {data} holds no text in {split}-*.bin; make it with everstep.programs.corpus"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Tensor:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        start = (index - (int(self._ends[shard - 1]) if shard else 0)) * self.context
        return torch.from_numpy(self.shards[shard][start : start + self.context + 1].astype(np.int64))


def rate(step: int, warmup: int, steps: int) -> float:
    """The learning rate's factor: up in a straight line, then down to a tenth along a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def count_pairs(shards: Sequence[Bytes]) -> NDArray[np.int64]:
    """How often each byte follows each other: (256, 256), the earlier byte first."""
    counts = np.zeros(SYMBOLS * SYMBOLS, np.int64)
    for shard in shards:
        pairs = shard[:-1].astype(np.int64) * SYMBOLS + shard[1:]
        counts += np.bincount(pairs, minlength=SYMBOLS * SYMBOLS)
    return counts.reshape(SYMBOLS, SYMBOLS)


def bits_of_bigram(counts: NDArray[np.int64], windows: Tensor) -> float:
    """Bits per byte of the table on the windows' bytes after the first; an unseen pair counts a hundredth."""
    smooth = counts + 0.01
    cost = -np.log2(smooth / smooth.sum(axis=1, keepdims=True))
    text = windows.numpy()
    return float(cost[text[:, :-1], text[:, 1:]].mean())


def _comparison(measured: dict[str, float], count: int) -> str:
    if not measured:
        return ""
    return (
        f"Bits per byte on the same {count:,} held-out bytes: {measured['bits_per_byte']:.3f} by this model, "
        f"{measured['bigram_bits_per_byte']:.3f} by a bigram table of the training text.\nA sample:\n"
    )


def _groups(model: GPT) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for biases and norms."""
    matrices = [one for one in model.parameters() if one.dim() == 2]
    others = [one for one in model.parameters() if one.dim() != 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


@torch.no_grad()
def go_on(model: GPT, prompt: bytes = PROMPT, length: int = SAMPLE_BYTES, seed: int = 0) -> str:
    """Text that the model goes on with after the prompt, drawn at temperature 0.8 with a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    text = list(prompt)
    for _ in range(length):
        seen = torch.tensor([text[-model.context :]], device=device)
        chances = functional.softmax(model(seen)[0, -1].float().cpu() / 0.8, dim=0)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text).decode("utf-8", "replace")
