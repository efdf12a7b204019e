"""Noise in whole numbers: its law, its exactness, and attacks on what floating point betrays."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from fedmjp.defences.base import Client
from fedmjp.defences.dp_sgd import DpSgd
from fedmjp.defences.local_dp import LocalDp
from fedmjp.defences.privacy import StepGrid
from fedmjp.defences.rounded_normal import FIRST_BITS, rounded_normal
from fedmjp.errors import ConfigError, DefenceError
from fedmjp.randomness import Randomness, SeededRandomness, SystemRandomness
from tests.studies import load_study

STUDY = load_study("dp_audit/study.py")
CLIENT = Client("gradient")


class Chosen(SeededRandomness):
    """A source whose first bits are given, and whose further bits are all equal."""

    first: int
    further: int

    def bits(self, name: str, shape: Sequence[int]) -> Tensor:
        return torch.full(tuple(shape), self.further if self.purpose else self.first)


def chosen(first: int, further: int) -> Chosen:
    source = Chosen(0)
    object.__setattr__(source, "first", first)
    object.__setattr__(source, "further", further)
    object.__setattr__(source, "of", lambda *purpose: _with_purpose(source, purpose))
    return source


def _with_purpose(source: Chosen, purpose: tuple[Any, ...]) -> Chosen:
    derived = chosen(source.first, source.further)
    object.__setattr__(derived, "purpose", purpose)
    return derived


@pytest.mark.parametrize("source", [SeededRandomness(3), SystemRandomness()], ids=["seed", "system"])
@pytest.mark.parametrize("deviation", [0.4, 1.7, 6.0])
def test_every_whole_number_has_the_share_of_a_rounded_normal(source: Randomness, deviation: float) -> None:
    drawn = rounded_normal(source, "w", (200_000,), deviation).numpy()
    numbers = np.arange(drawn.min() - 1, drawn.max() + 2)
    due = 200_000 * np.diff(stats.norm.cdf(np.append(numbers - 0.5, numbers[-1] + 0.5) / deviation))
    often = due > 10
    counts = np.array([(drawn == number).sum() for number in numbers])
    rest = [200_000 - counts[often].sum()], [200_000 - due[often].sum()]
    assert stats.chisquare(np.append(counts[often], rest[0]), np.append(due[often], rest[1])).pvalue > 1e-4


@pytest.mark.parametrize("deviation", [3.0, 1e5, 2.0**33])
@pytest.mark.parametrize("share", [0.3, 2.5, 6.0])
def test_a_tail_at_a_boundary_goes_where_its_further_bits_say(deviation: float, share: float) -> None:
    number = int(share * deviation)
    with mpmath.workprec(400):
        tail = mpmath.erfc((number + mpmath.mpf(0.5)) / (deviation * mpmath.sqrt(2))) / 2
        head = int(mpmath.floor(tail * 2 ** (FIRST_BITS + 1)))
    bits = (head << 1) - 2**64 * (head >= 2**62)
    # A smaller tail is farther out: further bits of zeros are below the boundary's, bits of ones above.
    for further, due in ((0, number + 1), (-1, number)):
        assert int(rounded_normal(chosen(bits, further), "w", (1,), deviation)) == due
    assert int(rounded_normal(chosen(bits | 1, 0), "w", (1,), deviation)) == -number - 1


def test_a_source_of_equal_bits_is_refused() -> None:
    with pytest.raises(DefenceError, match="it is broken"):
        rounded_normal(chosen(0, 0), "w", (1,), 1e5)


@settings(max_examples=60)
@given(
    st.integers(1, 300),
    st.floats(1e-6, 1e6),
    st.floats(1e-3, 1e3),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_clipped_steps_are_never_longer_than_the_norm(
    entries: int, scale: float, norm: float, dtype: torch.dtype
) -> None:
    vector = (scale * torch.randn(2, entries, generator=torch.Generator().manual_seed(entries))).clamp(-6e4, 6e4)
    parts = dict(zip("ab", vector.to(dtype), strict=True))
    steps = StepGrid(norm, 256).steps(parts)
    assert sum(value * value for tensor in steps.values() for value in tensor.tolist()) <= 256**2
    whole = torch.cat([tensor.double() for tensor in parts.values()])
    clipped = whole * min(1.0, norm / max(float(whole.norm()), 1e-300))
    moved = torch.cat([tensor.double() for tensor in steps.values()]) * norm / 256
    # Half a step of rounding; entries of a vector that rounding made longer shrink by as much.
    assert float((moved - clipped).abs().max()) <= norm / 256 * (0.5 + math.sqrt(2 * entries) / 2)


@pytest.mark.parametrize("sent", [torch.zeros(50), torch.linspace(-3, 3, 50), torch.full((50,), 1e-9)])
def test_what_leaves_is_a_whole_number_of_steps_whatever_was_sent(sent: Tensor) -> None:
    for defence in (LocalDp({"epsilon": 0.5}), DpSgd({"epsilon": 8})):
        released = defence.release([{"w": sent.double()}], randomness=SystemRandomness())["w"]
        step = 2.0**-18
        assert torch.equal((released / step).round() * step, released)


@pytest.mark.parametrize("name", ["local_dp", "dp_sgd"])
def test_float32_noise_breaks_its_epsilon_and_whole_numbers_keep_it(name: str) -> None:
    bounds = {(row["noise"], row["test"]): row["bound"] for row in STUDY.told_apart(name, 0.5, runs=300)}
    assert bounds.pop(("float32", "lattice")) > 2
    assert max(bounds.values()) <= 0.5, bounds


def test_float32_noise_names_a_picture_and_whole_numbers_do_not() -> None:
    vectors = torch.randn(8, 3_000, generator=torch.Generator().manual_seed(0))
    candidates = list(vectors / vectors.norm(dim=1, keepdim=True))
    hits = {(row["noise"], row["test"]): row["hits"] for row in STUDY.named("local_dp", 0.1, candidates, 6)}
    assert hits["float32", "lattice"] == 6
    assert hits["whole numbers", "lattice"] <= 2


def test_bounds_are_those_of_clopper_and_pearson() -> None:
    # 0 of 10,000: the upper end is 1 - 0.0125 ** (1 / 10,000) for two tests.
    most = 1 - (0.05 / 4) ** (1 / 10_000)
    assert STUDY.epsilon_bound(10_000, 0, 10_000, 0.0, 2) == pytest.approx(np.log((1 - most) / most))
    assert STUDY.epsilon_bound(500, 500, 1_000, 1e-5, 2) == 0.0


REFUSED: list[tuple[Mapping[str, Any], Tensor, str]] = [
    ({}, torch.ones(2, dtype=torch.complex64), "holds complex numbers"),
    ({}, torch.full((2,), 1e300, dtype=torch.float64), "too long for double precision"),
    ({}, torch.tensor([1.0, float("nan")]), "NaN"),
    ({"clipping_norm": 1e6}, torch.ones(2, dtype=torch.float16), "does not fit torch.float16 of 'w'"),
    ({"epsilon": 1e-12, "delta": 1e-12}, torch.ones(10_000), "take a larger epsilon"),
]


@pytest.mark.parametrize(("options", "tensor", "reason"), REFUSED)
def test_what_cannot_be_protected_does_not_leave(options: Mapping[str, Any], tensor: Tensor, reason: str) -> None:
    with pytest.raises(DefenceError, match=reason):
        LocalDp(options).protect({"w": tensor}, CLIENT, randomness=SeededRandomness(0))


@pytest.mark.parametrize("norm", [1e-31, 1e31])
def test_a_norm_that_float32_cannot_hold_is_refused(norm: float) -> None:
    with pytest.raises(ConfigError, match="clipping_norm"):
        LocalDp({"clipping_norm": norm})
