"""The local computation: against a plain optimiser, and the stacked pass against the plain one."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fedmjp.data.selection import select_for
from fedmjp.exchange import prepare_round
from fedmjp.models import names
from fedmjp.private import PrivateBatch
from fedmjp.stacked import ENTRANCE, entrance_gradients
from fedmjp.threat import ThreatModel
from fedmjp.updates import local_update
from tests.conftest import small_model, small_scenario


def batches(size: int, count: int) -> list[PrivateBatch]:
    scenario = small_scenario(defences="jigsaw", clients=count, pictures_per_client=size, batch_size=size)
    selection = select_for(scenario)
    return [prepare_round(scenario, selection, client, 1) for client in range(count)]


@pytest.mark.parametrize(("defence", "smoothing"), [("none", 0.0), ("mjp", 0.0), ("none", 0.2)])
def test_delta_equals_torchs_sgd(defence: str, smoothing: float) -> None:
    model, (batch,) = small_model(defence=defence), batches(2, 1)
    trained = copy.deepcopy(model)
    optimiser = torch.optim.SGD(trained.parameters(), lr=0.1)
    mask = batch.mask if defence == "mjp" else None
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(trained(batch.shuffled, mask), batch.labels, label_smoothing=smoothing).backward()
        optimiser.step()
    before = dict(model.named_parameters())
    threat = ThreatModel(update="delta", local_steps=3, local_learning_rate=0.1, label_smoothing=smoothing)
    found = local_update(model, batch, threat)
    assert found.keys() == before.keys()
    for name, parameter in trained.named_parameters():
        assert torch.allclose(found[name], (parameter - before[name]).detach(), atol=1e-6), name


@pytest.mark.parametrize("name", ["deit_tiny", "deit_tiny_april"])
@pytest.mark.parametrize("defence", ["none", "mjp"])
@pytest.mark.parametrize(("size", "count", "smoothing"), [(1, 3, 0.0), (2, 2, 0.2)])
def test_stacked_gradients_equal_those_of_each_batch(
    name: str, defence: str, size: int, count: int, smoothing: float
) -> None:
    model, private = small_model(name, defence), batches(size, count)
    wanted = [each for each, _ in model.named_parameters() if each in ENTRANCE]
    assert len(wanted) == (6 if defence == "mjp" else 5)
    made = entrance_gradients(model, private, wanted, label_smoothing=smoothing)
    for stacked, batch in zip(made, private, strict=True):
        plain = local_update(model, batch, ThreatModel(label_smoothing=smoothing))
        for each in wanted:
            assert stacked[each].shape == plain[each].shape
            assert (stacked[each] - plain[each]).norm() <= 1e-5 * plain[each].norm(), each


def test_oracle_token_gradients_sum_to_what_an_upload_shows() -> None:
    model, private = small_model(defence="mjp"), batches(1, 1)
    wanted = (names.ORACLE_TOKEN_GRADIENTS, names.POSITION_EMBEDDING, names.UNKNOWN_EMBEDDING)
    found = entrance_gradients(model, private, wanted)[0]
    tokens, mask = found[names.ORACLE_TOKEN_GRADIENTS][0, 1:], private[0].mask[0]
    assert mask.any()
    assert (tokens[mask].abs().sum(1) > 0).all(), "rows that no upload shows"
    assert torch.allclose(tokens[mask].sum(0), found[names.UNKNOWN_EMBEDDING], atol=1e-7)
    assert torch.allclose(tokens[~mask], found[names.POSITION_EMBEDDING][0, 1:][~mask])


def test_other_tensors_are_refused() -> None:
    with pytest.raises(KeyError, match="head"):
        entrance_gradients(small_model(), batches(1, 1), [names.HEAD_BIAS])
