"""A program whose weights turn NaN at a given step: the loss goes on looking fine to nobody."""

import torch

from everstep.trainer import Program


def build(config, data):
    model = torch.nn.Linear(4, 1)
    rows = torch.arange(40, dtype=torch.float32).view(10, 4) / 40
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    def loss(batch):
        value = model(batch[0]).square().mean()
        return value * float("nan") if scheduler.last_epoch + 1 == config["at"] else value

    return Program(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        dataset=torch.utils.data.TensorDataset(rows),
        batch_size=5,
        loss=loss,
    )
