import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmjp.config import Precision
from fedmjp.degradation import degrade
from fedmjp.threat import ThreatModel


def _update(scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": scale * torch.randn(40, 30, generator=generator),
        "vector": scale * torch.randn(500, generator=generator) ** 3,
        "zeros": torch.zeros(7),
    }


def _degraded(update: dict[str, torch.Tensor], seed: int = 0, **fields: float | Precision) -> dict[str, torch.Tensor]:
    return degrade(update, ThreatModel.parse(fields), generator=torch.Generator().manual_seed(seed))


def test_a_plain_protocol_leaves_an_update_as_it_is() -> None:
    update = _update()
    for name, tensor in _degraded(update).items():
        assert torch.equal(tensor, update[name])


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.999])
def test_pruning_keeps_the_largest_entries_as_they_are(kept: float) -> None:
    update = _update()
    pruned = _degraded(update, kept=kept)
    for name in ("matrix", "vector"):
        before, after = update[name].flatten().numpy(), pruned[name].flatten().numpy()
        largest = np.argsort(-np.abs(before), kind="stable")[: round(kept * before.size)]
        assert set(np.flatnonzero(after)) == set(largest)
        np.testing.assert_array_equal(after[largest], before[largest])
    assert not pruned["zeros"].any()


def test_noise_is_gaussian_of_the_stated_size_on_every_entry_of_what_pruning_left() -> None:
    update = {"w": torch.cat([torch.full((50_000,), 2.0), torch.full((50_000,), 1e-3)])}
    noise = (
        _degraded(update, noise=0.1, kept=0.5)["w"].double() - torch.tensor([2.0] * 50_000 + [0.0] * 50_000).double()
    )
    assert float(noise.std()) == pytest.approx(0.1 * math.sqrt(2), rel=0.02)
    assert float((noise / noise.std()).pow(4).mean()) == pytest.approx(3, rel=0.05)
    assert not (noise == 0).any()


@pytest.mark.parametrize(("precision", "bits"), [("float16", 11), ("bfloat16", 8)])
@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e5])
def test_rounded_entries_have_the_bits_of_their_precision(precision: Precision, bits: int, scale: float) -> None:
    update = _update(scale)
    for name, tensor in _degraded(update, precision=precision).items():
        mantissas, exponents = np.frexp(tensor.numpy())
        assert (mantissas * 2.0**bits == np.round(mantissas * 2.0**bits)).all()
        error = (tensor - update[name]).abs()
        rounding = ThreatModel(precision=precision).rounding
        finest = float(update[name].abs().max()) * 2.0**-38  # a scaled float16 ends there
        assert (error <= rounding * update[name].abs() + finest).all()
        assert exponents.shape == tensor.shape


@given(st.floats(1e-44, 1e30), st.sampled_from(["float16", "bfloat16"]))
def test_rounding_never_leaves_the_range(largest: float, precision: Precision) -> None:
    rounded = _degraded({"w": torch.tensor([largest, -largest / 3, 0.0])}, precision=precision)["w"]
    assert rounded.isfinite().all()
    assert rounded[2] == 0


def test_a_part_of_an_update_is_degraded_as_the_whole_is_and_by_the_seed_alone() -> None:
    update = _update()
    fields = {"noise": 0.1, "kept": 0.5, "precision": "float16"}
    whole, again, other = _degraded(update, **fields), _degraded(update, **fields), _degraded(update, 1, **fields)
    part = _degraded({"vector": update["vector"]}, **fields)
    assert torch.equal(part["vector"], whole["vector"])
    assert torch.equal(again["matrix"], whole["matrix"])
    assert not torch.equal(other["matrix"], whole["matrix"])
