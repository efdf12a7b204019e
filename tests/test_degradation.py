"""Updates that were degraded, whatever their size, and by one defence after another."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedmjp.defences.base import Client
from fedmjp.randomness import SeededRandomness
from fedmjp.threat import ThreatModel


def degraded(tensor: Tensor, *defences: str) -> Tensor:
    pipeline = ThreatModel.parse({"defences": defences}).pipeline
    return pipeline.protect({"w": tensor}, Client("gradient"), randomness=SeededRandomness(0))["w"]


def test_noise_is_gaussian_of_the_stated_size_on_every_entry_of_what_pruning_left() -> None:
    update = torch.cat([torch.full((50_000,), 2.0), torch.full((50_000,), 1e-3)])
    left = torch.tensor([2.0] * 50_000 + [0.0] * 50_000).double()
    noise = degraded(update, "prune:kept=0.5", "gaussian:noise=0.1").double() - left
    assert float(noise.std()) == pytest.approx(0.1 * math.sqrt(2), rel=0.02)
    assert float((noise / noise.std()).pow(4).mean()) == pytest.approx(3, rel=0.05)
    assert not (noise == 0).any()


@given(st.floats(1e-44, 1e30), st.sampled_from(["float16", "bfloat16"]))
def test_rounding_never_leaves_the_range(largest: float, precision: str) -> None:
    rounded = degraded(torch.tensor([largest, -largest / 3, 0.0]), f"round:precision={precision}")
    assert rounded.isfinite().all()
    assert rounded[2] == 0
