"""The bound on what one upload tells of masked patches, against differences of the attack's own equations."""

import math

import pytest
import torch

from fedmjp.attacks.mjp.facts import linear_facts
from fedmjp.attacks.mjp.span.equations import LEVEL_WEIGHT, equations
from fedmjp.data.selection import select_for
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.private import PrivateBatch
from fedmjp.settings import Picture
from tests.conftest import private_batch, small_scenario, upload_of
from tests.studies import load_study

patch_bounds = load_study("span_certificates/study.py").patch_bounds

STEP = 1e-5


@pytest.fixture(scope="module")
def batch() -> PrivateBatch:
    chosen = select_for(small_scenario())
    pictures = [chosen.load(chosen.entries[0])]
    return private_batch(pictures, grid=8, mask_ratio=0.09, gradient_of=Picture.SHUFFLED, seed=0)


def test_the_bound_is_that_of_a_difference_quotient(batch: PrivateBatch, defended: VitClassifier) -> None:
    upload = upload_of(defended, batch)
    facts = linear_facts(upload, defended)
    setup = equations(upload, facts, defended)
    patches = to_patches((batch.clean - defended.mean) / defended.std, defended.patch_size)[0].double()
    truth = (patches - facts.outside) @ facts.basis.mT
    tokens = setup.tokens(truth, torch.arange(len(truth)))
    seen = setup.block.keys_values(torch.cat([setup.class_token, tokens]))
    attention = setup.block.attention(tokens, seen)
    place = int(setup.hole[0])
    steps = torch.cat([torch.eye(setup.unknowns), -torch.eye(setup.unknowns)]).double() * STEP
    around = setup.at(setup.tokens(truth[place] + steps, setup.hole[:1].expand(len(steps))) + attention[place])
    here = setup.at((tokens + attention)[place][None])
    inputs = here.whitened * setup.block.norm2.gain + setup.block.norm2.bias
    activations = torch.nn.functional.gelu(here.before_gelu)
    noise = float(setup.inputs.expected(inputs)), float(setup.activations.expected(activations))
    information = torch.outer(setup.level, setup.level) * LEVEL_WEIGHT**2 / sum(noise)
    for rows, span, variance in (
        (around.outside_inputs, setup.inputs, noise[0]),
        (around.outside_activations, setup.activations, noise[1]),
    ):
        up, down = rows.split(setup.unknowns)
        slopes = (up - down) / (2 * STEP)
        information = information + slopes @ slopes.mT * span.outside / variance
    error = float(information.inverse().trace()) / setup.values * float(defended.std.max()) ** 2
    assert float(patch_bounds(upload, batch, defended)[0][0]) == pytest.approx(-10 * math.log10(error), abs=0.01)


def test_more_equations_never_tell_less(batch: PrivateBatch, defended: VitClassifier) -> None:
    first, both = patch_bounds(upload_of(defended, batch), batch, defended)
    assert len(first) == int(batch.mask.sum())
    assert (both >= first - 1e-6).all()
    assert (both > first).any()


def test_without_a_mask_there_is_nothing_to_bound(defended: VitClassifier) -> None:
    chosen = select_for(small_scenario())
    pictures = [chosen.load(chosen.entries[0])]
    clear = private_batch(pictures, grid=8, mask_ratio=0.0, gradient_of=Picture.SHUFFLED, seed=0)
    first, both = patch_bounds(upload_of(defended, clear), clear, defended)
    assert len(first) == len(both) == 0
