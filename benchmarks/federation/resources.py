"""What clients of a simulated training take of this machine: cores, and as much of a GPU as a step was measured to."""

import math
import multiprocessing
from multiprocessing.connection import Connection

import torch

from fedmjp import provenance
from fedmjp.benchmarks.federation.simulation import Resources
from fedmjp.data.loading import Batch
from fedmjp.errors import ConfigError
from fedmjp.models.build import build
from fedmjp.scenario import TrainingScenario
from fedmjp.training.loop import Schedule, Trainer

SHARE_DIGITS = 10_000  # Ray counts a GPU's shares with four decimals
USABLE = 0.95  # of a GPU's memory: what lies between its pieces is lost
STEPS = 2  # the optimiser has its memory from the second one on


def resources_for(scenario: TrainingScenario, *, gpus_per_client: float | None) -> Resources:
    """As many clients at a time as there are cores, each with an equal share of them; on GPUs, as many as fit.

    Raises:
        ConfigError: If a share was asked for that no GPU here can give, or none was and no client fits on one.
    """
    cores = provenance.hardware()["cores"]
    processes = min(cores, len(scenario.participants(1)))
    if scenario.device == "cpu":
        if gpus_per_client:
            raise ConfigError(f"--gpus-per-client {gpus_per_client:g} was asked for, but the run is on the CPU")
        return Resources(scenario.clients, processes, cores // processes, 0)
    gpus = torch.cuda.device_count()
    if gpus_per_client is None:
        processes = min(processes, gpus * clients_per_gpu(*measured_step(scenario), scenario))
        share = math.floor(SHARE_DIGITS / math.ceil(processes / gpus)) / SHARE_DIGITS
    elif 0 < gpus_per_client <= gpus:
        share = gpus_per_client
        processes = min(processes, int(gpus / share + 1e-6) if share >= 1 else gpus * int(1 / share + 1e-6))
    else:
        raise ConfigError(f"--gpus-per-client {gpus_per_client:g} is not above 0 and at most {gpus}")
    return Resources(scenario.clients, processes, cores // processes, share)


def clients_per_gpu(taken: int, memory: int, scenario: TrainingScenario) -> int:
    """How many clients that take so many bytes fit into a GPU's; ConfigError if none does."""
    fitting = int(USABLE * memory / taken)
    if not fitting:
        recipe = scenario.training.recipe
        raise ConfigError(
            f"a step of {recipe.at_once or recipe.batch_size} pictures takes {taken / 1e9:.1f} GB of a GPU's "
            f"{memory / 1e9:.1f}: set recipe.at_once to fewer, or recipe.batch_size"
        )
    return fitting


def measured_step(scenario: TrainingScenario) -> tuple[int, int]:
    """Bytes that a GPU has less after a client's first steps, and its bytes in all.

    The steps are taken in a process of its own, which gives everything back; what others have taken counts as the
    client's. Where memory does not suffice, one byte more is taken than there is.

    Raises:
        ConfigError: If the steps failed otherwise.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_measure, args=(scenario, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        taken, memory = ours.recv()
    except EOFError:
        raise ConfigError(
            "a trial step of a client failed on the GPU, see above; --gpus-per-client does without it"
        ) from None
    finally:
        process.join()
    return taken, memory


def _measure(scenario: TrainingScenario, answer: Connection) -> None:
    try:
        take_steps(scenario)
        free, memory = torch.cuda.mem_get_info()
        answer.send((memory - free, memory))
    except torch.OutOfMemoryError:
        memory = torch.cuda.mem_get_info()[1]
        answer.send((memory + 1, memory))


def take_steps(scenario: TrainingScenario) -> None:
    """Train on noise as a client does in its last epoch, in which all is done that its recipe and defences ask for."""
    scenario, training = scenario.planned(STEPS), scenario.training
    recipe, network = training.recipe, scenario.network.model_copy(update={"weights": None})
    model = build(network, drop_path=recipe.drop_path).to(torch.device(scenario.device))
    images = torch.rand(recipe.batch_size, 3, network.image_size, network.image_size)
    labels = torch.arange(recipe.batch_size) % network.classes
    batch = Batch(images, labels, tuple(range(recipe.batch_size)))
    epochs = training.epochs or recipe.epochs
    trainer = Trainer(model, training, scenario.pipeline, schedule=Schedule(epochs, STEPS), seed=scenario.seed)
    trainer.epoch(epochs - 1, [batch] * STEPS)
