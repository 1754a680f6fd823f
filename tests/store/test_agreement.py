"""What the trainer writes is what the store verifies and digests."""

import fabric
import torch
from rigs.parts import write_part
from torch import nn

from everstep.core.checkpoint import Key, Manifest
from everstep.store import checkpoint, tensors
from everstep.trainer import reading, structure, writer
from everstep.trainer.program import Program


class Tied(nn.Module):
    """A tied weight, a running mean, a mask with -inf, complex and half-precision tensors, a transposed one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.turned = nn.Parameter(torch.randn(3, 5).T)
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.low = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.register_buffer("mask", torch.full((2, 2), float("-inf")))
        self.register_buffer("none", torch.zeros(0, 3))


def test_a_checkpoint_of_the_trainer_verifies_and_has_the_digest_of_its_weights(tmp_path):
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    program = Program(model=model, optimizer=optimizer, dataset=[1], batch_size=1, loss=lambda batch: batch)
    key = Key(7, 2)
    folder = tmp_path / key.folder
    folder.mkdir()
    files = []
    for rank in (0, 1):
        files += write_part(folder, program, rank, 2)
    manifest = Manifest(
        job=fabric.JOB,
        run=fabric.RUN,
        attempt=2,
        step=7,
        world_size=2,
        parent_step=0,
        samples=7,
        time=1.0,
        files=tuple(files),
    )
    writer.commit(folder, manifest.to_json().encode())
    result = checkpoint.verify(folder, structure.of(program, 2), run=fabric.RUN, job=fabric.JOB)
    assert (result.ok, result.why) == (True, "")
    expected = tensors.weights_digest(model.state_dict())
    assert tensors.weights_digest(reading.load_checkpoint(folder)) == expected
    assert tensors.weights_digest_of(folder) == expected
