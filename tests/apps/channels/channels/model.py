"""A small network, and a step of training that is the same in every process."""

import torch
from torch import nn

PICTURES = 8


def net() -> nn.Module:
    draw = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU(), nn.Linear(16, 10))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.1, 0.1, generator=draw)
    return model


def trained(state: dict) -> dict:
    model = net().train()
    model.load_state_dict(state)
    images = torch.rand(PICTURES, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.nn.functional.cross_entropy(model(images), torch.arange(PICTURES)).backward()
    optimiser.step()
    return dict(model.state_dict())
