"""Gradient matching within the linear facts: zero at the truth, blind to the shuffle, better than its start."""

import numpy as np
import pytest
import torch
from scipy.optimize import approx_fprime

from fedmjp.attacks.mjp.facts import linear_facts
from fedmjp.attacks.mjp.matching import MjpMatching, _Mismatch
from fedmjp.attacks.testing import CHECKS, AttackTrial
from fedmjp.data.selection import Selection
from fedmjp.errors import ConfigError
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel
from fedmjp.updates import gradient
from tests.conftest import batch_of


@pytest.fixture(scope="module")
def batch(pictures: Selection) -> PrivateBatch:
    return batch_of(pictures, Picture.SHUFFLED)


@pytest.fixture(scope="module")
def upload(defended: VitClassifier, batch: PrivateBatch) -> Upload:
    return Upload(gradient(defended, batch), "gradient", 1, 1, 0, "weights")


@pytest.fixture(scope="module")
def mismatch(defended: VitClassifier, upload: Upload) -> _Mismatch:
    return _Mismatch(upload, linear_facts(upload, defended), defended, ThreatModel())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check) -> None:
    check(AttackTrial(attack=MjpMatching({"iterations": 2}), model="deit_tiny"))


def test_the_clean_and_the_shuffled_picture_match(mismatch: _Mismatch, batch: PrivateBatch) -> None:
    for image in (batch.clean, batch.shuffled):
        loss, _ = mismatch(mismatch.coefficients(image).numpy().ravel())
        assert loss < 1e-4
    grey = torch.full_like(batch.clean, 0.5)
    assert mismatch(mismatch.coefficients(grey).numpy().ravel())[0] > 1e-2


def test_any_coefficients_satisfy_the_facts(mismatch: _Mismatch, defended: VitClassifier, upload: Upload) -> None:
    facts = linear_facts(upload, defended)
    random = np.random.default_rng(0).standard_normal((64, len(facts.open)))
    patches = mismatch.patches(random)
    outside = patches - (patches @ facts.basis.mT) @ facts.basis
    assert torch.allclose(outside, facts.outside - (facts.outside @ facts.basis.mT) @ facts.basis, atol=1e-9)
    assert torch.allclose(patches[facts.mask] @ facts.level, torch.ones(1, dtype=torch.float64), atol=1e-6)


def test_the_slope_equals_finite_differences(mismatch: _Mismatch, batch: PrivateBatch) -> None:
    start = mismatch.coefficients(to_grey(batch)).numpy().ravel()
    direction = np.random.default_rng(0).standard_normal(start.size)

    def along(step: np.ndarray) -> float:
        return mismatch(start + step[0] * direction)[0]

    expected = approx_fprime(np.zeros(1), along, 1e-6)[0]
    assert mismatch(start)[1] @ direction == pytest.approx(expected, rel=1e-3)


def to_grey(batch: PrivateBatch) -> torch.Tensor:
    return batch.clean.mean(dim=1, keepdim=True).expand_as(batch.clean)


def test_the_search_comes_nearer_than_its_start(defended: VitClassifier, upload: Upload) -> None:
    attack = MjpMatching({"iterations": 4})
    seen: list[float] = []
    attack.on_progress = lambda done, total, loss: seen.append(loss)
    made = attack.run([upload], defended, ThreatModel(), generator=torch.Generator().manual_seed(0))[0]
    assert made.diagnostics["loss"] < made.diagnostics["loss_at_start"] / 2
    assert made.diagnostics["iterations"] == 4
    assert len(seen) == 5, "the start is told too"
    assert seen == sorted(seen, reverse=True)


def test_a_budget_of_no_time_still_makes_one_step(defended: VitClassifier, upload: Upload) -> None:
    made = MjpMatching({"seconds": 1e-3}).run(
        [upload], defended, ThreatModel(), generator=torch.Generator().manual_seed(0)
    )[0]
    assert made.diagnostics["iterations"] == 1


def test_what_it_cannot_attack_is_refused(defended: VitClassifier) -> None:
    attack = MjpMatching()
    assert "not the sum of 3 steps" in (attack.refusal(defended, ThreatModel(update="delta", local_steps=3)) or "")
    assert "mjp_prior" in (attack.refusal(defended, ThreatModel(batch_size=2)) or "")
    with pytest.raises(ConfigError, match="start"):
        MjpMatching({"start": "grey"})
