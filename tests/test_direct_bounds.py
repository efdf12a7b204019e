"""Gradients that only bounds see, computed beside whatever the other attacks of an experiment read."""

import pytest
import torch

from benchmarks.plan.experiment import Experiment
from benchmarks.uploads.direct import DirectUploads
from benchmarks.uploads.source import Recorded
from fedmjp.config import FederationConfig
from fedmjp.data.selection import select_for
from fedmjp.models import names
from fedmjp.settings import Picture


def token_gradients(*attacks: str) -> list[torch.Tensor]:
    experiment = Experiment(
        federation=FederationConfig(
            models=("deit_tiny",), clients=1, pictures_per_client=2, image_size=64, patch_size=8, mask_ratio=0.3
        ),
        attacks={"deit_tiny": attacks},
        settings=("b", "c"),
        metrics=("psnr",),
    )
    selection = select_for(experiment.federation)
    batches = [tuple(entry.name for entry in batch) for batch in selection.batches(experiment.federation)]
    found = DirectUploads(experiment, selection).uploads(experiment.arms[0], Picture.SHUFFLED, batches).values()
    return [each.upload.tensors[names.ORACLE_TOKEN_GRADIENTS] for each in found if isinstance(each, Recorded)]


@pytest.mark.parametrize("other", ["mjp_span", "gradient_matching"])
def test_a_bound_gets_them_beside_attacks_that_read_more_than_the_entrance(other: str) -> None:
    alone, beside = token_gradients("oracle_patch_embedding"), token_gradients("oracle_patch_embedding", other)
    assert len(alone) == len(beside) == 2
    for one, two in zip(alone, beside, strict=True):
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-6 * float(one.abs().max()))
