"""What clients of a simulation take of a machine: cores, and of GPUs what a step was measured to."""

import pytest
import torch

from fedmjp import provenance
from fedmjp.benchmarks.federation import resources
from fedmjp.benchmarks.federation.resources import clients_per_gpu, measure_step, resources_for, take_steps
from fedmjp.errors import ConfigError
from fedmjp.scenario import TrainingScenario
from tests.federations import PLAIN, scenario_of

H100 = 85_000_000_000  # bytes


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 cores and 8 GPUs, on each of which three clients fit."""
    monkeypatch.setattr(provenance, "hardware", lambda: {"cores": 128})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(resources, "measure_step", lambda _scenario: (H100 // 4, H100))


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("clients", "asked", "processes", "cores", "share"),
    [
        (100, None, 24, 5, 0.3333),
        (20, None, 20, 6, 0.3333),
        (8, None, 8, 16, 1.0),
        (3, None, 3, 42, 1.0),
        (100, 0.25, 32, 4, 0.25),
        (100, 2, 4, 32, 2),
    ],
)
def test_as_many_clients_work_at_a_time_as_fit(
    clients: int, asked: float | None, processes: int, cores: int, share: float
) -> None:
    found = resources_for(scenario_of(clients=clients, device="cuda"), gpus_per_client=asked)
    assert (found.processes, found.cores, found.gpus) == (processes, cores, share)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("asked", [0.0, -1.0, 9.0])
def test_shares_that_there_are_not_are_refused(asked: float) -> None:
    with pytest.raises(ConfigError, match="is not above 0 and at most 8"):
        resources_for(scenario_of(device="cuda"), gpus_per_client=asked)


def test_what_does_not_fit_is_told_with_what_helps() -> None:
    scenario = scenario_of(recipe=PLAIN | {"batch_size": 1024})
    with pytest.raises(
        ConfigError, match=r"a step of 1024 pictures takes 90\.0 GB of a GPU's 85\.0: set recipe\.at_on"
    ):
        clients_per_gpu(90_000_000_000, H100, scenario)
    assert clients_per_gpu(H100 // 2, H100, scenario) == 1
    assert clients_per_gpu(H100 // 10, H100, scenario) == 9


def scenarios() -> list[TrainingScenario]:
    model = {"model": {"name": "deit_micro", "image_size": 64, "patch_size": 8, "classes": 4}}
    return [
        scenario_of(**model),
        scenario_of(**model, defences=["mjp"], recipe=PLAIN | {"at_once": 1, "mixup": 0.8}),
        scenario_of(**model, defences=["dp_sgd:epsilon=8,delta=1e-5"]),
        scenario_of(**model, strategy="fedsgd"),
    ]


@pytest.mark.parametrize("scenario", scenarios(), ids=lambda scenario: scenario.label)
def test_the_steps_that_are_measured_are_those_of_a_client(
    scenario: TrainingScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []
    step = torch.optim.AdamW.step

    def counted(optimiser: torch.optim.AdamW, *arguments: object) -> object:
        shown.append(sum(value.grad is not None for group in optimiser.param_groups for value in group["params"]))
        return step(optimiser, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    take_steps(scenario)
    assert len(shown) == 2
    assert min(shown) > 50


@pytest.mark.skipif(torch.cuda.is_available(), reason="the steps succeed here")
def test_a_trial_that_fails_ends_in_one_line() -> None:
    with pytest.raises(ConfigError, match="a trial step of a client failed on the GPU, see above"):
        measure_step(scenario_of(device="cuda"))
