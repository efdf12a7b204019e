"""Gradients that only bounds see, computed beside whatever the other attacks of an experiment read."""

from collections.abc import Sequence

import pytest
import torch

from fedmjp.benchmarks.plan.experiment import Experiment
from fedmjp.benchmarks.uploads.direct import DirectUploads
from fedmjp.data.selection import select_for
from fedmjp.exchange import Exchange
from fedmjp.models import names
from tests.conftest import small_scenario


def token_gradients(*attacks: str, besides: Sequence[str] = ()) -> list[torch.Tensor]:
    scenario = small_scenario(defences=["jigsaw:mask_ratio=0.3", *besides], pictures_per_client=2)
    values = {"scenario": scenario, "attacks": attacks, "settings": ("b", "c"), "metrics": ("psnr",)}
    experiment = Experiment.parse(values)
    selection = select_for(scenario)
    batches = [tuple(entry.name for entry in batch) for batch in selection.batches(scenario)]
    found = DirectUploads(experiment, selection).uploads(batches).values()
    return [each.upload.tensors[names.ORACLE_TOKEN_GRADIENTS] for each in found if isinstance(each, Exchange)]


@pytest.mark.parametrize("other", ["mjp_span", "gradient_matching"])
def test_a_bound_gets_them_beside_attacks_that_read_more_than_the_entrance(other: str) -> None:
    alone, beside = token_gradients("oracle_patch_embedding"), token_gradients("oracle_patch_embedding", other)
    assert len(alone) == len(beside) == 2
    for one, two in zip(alone, beside, strict=True):
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-6 * float(one.abs().max()))


@pytest.mark.parametrize("noise", ["gaussian:noise=0.5", "local_dp"])
def test_no_defence_acts_on_what_only_a_bound_sees(noise: str) -> None:
    """Whether uploads are computed together (noise on each tensor) or one by one (noise on the whole update)."""
    for plain, defended in zip(
        *(token_gradients("oracle_patch_embedding", besides=each) for each in ((), (noise,))), strict=True
    ):
        assert torch.allclose(plain, defended, rtol=1e-4, atol=1e-6 * float(plain.abs().max()))
