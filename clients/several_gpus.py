"""A client that has several GPUs: a process for each trains its part of every batch."""

import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from flwr.app import RecordDict

from fedmjp.processes import end_with_parent
from fedmjp.scenario import TrainingScenario
from fedmjp.training.process_group import SINGLE, ProcessGroup, join_group

if TYPE_CHECKING:
    from fedmjp.clients.training import LocalTraining


def processes_for(scenario: TrainingScenario) -> int:
    """One for each GPU that this process may use; one in all where they could not share the work."""
    if scenario.device != "cuda" or scenario.pipeline.by_example:
        return 1
    return max(torch.cuda.device_count(), 1)


@contextmanager
def helped(local: "LocalTraining", asked: RecordDict, processes: int) -> Iterator[ProcessGroup]:
    """Start the other processes, which take the same steps as this one, for a while.

    Args:
        local: What they train; they are given a copy of it.
        asked: The server's message.
        processes: How many, with this one.

    Raises:
        TrainingError: If one of them failed.
    """
    if processes == 1:
        yield SINGLE
        return
    spawn = multiprocessing.get_context("spawn")  # CUDA cannot be used after a fork
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        others = [
            spawn.Process(target=_help, args=(local, asked, ProcessGroup(number, processes), meeting), daemon=True)
            for number in range(1, processes)
        ]
        for other in others:
            other.start()
        try:
            with join_group(ProcessGroup(0, processes), local.scenario.device, meeting) as group:
                yield group
        finally:
            for other in others:
                other.terminate()
                other.join()


def _help(local: "LocalTraining", asked: RecordDict, group: ProcessGroup, meeting: str) -> None:
    end_with_parent()  # also in the middle of waiting for the others
    if local.scenario.device == "cuda":
        torch.cuda.set_device(group.number)
    with join_group(group, local.scenario.device, meeting):
        local.help(asked, group)
