"""Resources of clients in a simulated training: cores, and the share of a GPU that a step was measured to take."""

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
    """Plan as many clients at a time as there are cores, or as fit on the GPUs; each gets an equal share of the cores.

    Args:
        scenario: Of the training.
        gpus_per_client: Share of a GPU, or number of GPUs, that the user asks for; None measures it.

    Raises:
        ConfigError: If no GPU here can give that share, or no client fits on one.
    """
    cores = provenance.hardware()["cores"]
    processes = min(cores, len(scenario.participants(1)))
    if scenario.device == "cpu":
        if gpus_per_client:
            raise ConfigError(f"--gpus-per-client {gpus_per_client:g} was asked for, but the run is on the CPU")
        return Resources(scenario.clients, processes, cores // processes, 0)
    gpus = torch.cuda.device_count()
    if gpus_per_client is None:
        processes = min(processes, gpus * clients_per_gpu(*measure_step(scenario), scenario))
        share = math.floor(SHARE_DIGITS / math.ceil(processes / gpus)) / SHARE_DIGITS
    elif 0 < gpus_per_client <= gpus:
        share = gpus_per_client
        processes = min(processes, int(gpus / share + 1e-6) if share >= 1 else gpus * int(1 / share + 1e-6))
    else:
        raise ConfigError(f"--gpus-per-client {gpus_per_client:g} is not above 0 and at most {gpus}")
    return Resources(scenario.clients, processes, cores // processes, share)


def clients_per_gpu(client_bytes: int, gpu_bytes: int, scenario: TrainingScenario) -> int:
    """Count the clients that fit on a GPU.

    Args:
        client_bytes: Memory of a client.
        gpu_bytes: Memory of a GPU.
        scenario: Of the training; an error names its batch size.

    Raises:
        ConfigError: If none fits.
    """
    fitting = int(USABLE * gpu_bytes / client_bytes)
    if not fitting:
        recipe = scenario.training.recipe
        raise ConfigError(
            f"a step of {recipe.at_once or recipe.batch_size} pictures takes {client_bytes / 1e9:.1f} GB of a GPU's "
            f"{gpu_bytes / 1e9:.1f}: set recipe.at_once to fewer, or recipe.batch_size"
        )
    return fitting


def measure_step(scenario: TrainingScenario) -> tuple[int, int]:
    """Measure the bytes that a client takes of a GPU, and return them with the GPU's bytes.

    The first steps are taken in a process of its own, which gives everything back; memory of other programs counts as
    the client's. Where memory does not suffice, one byte more than the GPU has is returned.

    Args:
        scenario: Of the training.

    Raises:
        ConfigError: If the steps failed otherwise.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_measure, args=(scenario, sender), daemon=True)
    process.start()
    sender.close()
    try:
        client_bytes, gpu_bytes = receiver.recv()
    except EOFError:
        raise ConfigError(
            "a trial step of a client failed on the GPU, see above; --gpus-per-client does without it"
        ) from None
    finally:
        process.join()
    return client_bytes, gpu_bytes


def _measure(scenario: TrainingScenario, answer: Connection) -> None:
    try:
        take_steps(scenario)
        free, memory = torch.cuda.mem_get_info()
        answer.send((memory - free, memory))
    except torch.OutOfMemoryError:
        memory = torch.cuda.mem_get_info()[1]
        answer.send((memory + 1, memory))


def take_steps(scenario: TrainingScenario) -> None:
    """Train on noise as a client does in its last epoch, when its recipe and defences are all at work.

    Args:
        scenario: Of the training.
    """
    scenario, training = scenario.planned(STEPS), scenario.training
    recipe, network = training.recipe, scenario.network.model_copy(update={"weights": None})
    model = build(network, drop_path=recipe.drop_path).to(torch.device(scenario.device))
    images = torch.rand(recipe.batch_size, 3, network.image_size, network.image_size)
    labels = torch.arange(recipe.batch_size) % network.classes
    batch = Batch(images, labels, tuple(range(recipe.batch_size)))
    epochs = training.epochs or recipe.epochs
    trainer = Trainer(model, training, scenario.pipeline, schedule=Schedule(epochs, STEPS), seed=scenario.seed)
    trainer.epoch(epochs - 1, [batch] * STEPS)
