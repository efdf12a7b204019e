"""A client that has several GPUs: a process for each trains its part of every batch."""

import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from flwr.app import RecordDict

from fedmjp.processes import end_with_parent
from fedmjp.scenario import TrainingScenario
from fedmjp.training.process_group import SINGLE, ProcessGroup, join_group


class SharedTraining(Protocol):
    """A client's training whose batches several processes share."""

    scenario: TrainingScenario

    def help(self, content: RecordDict, group: ProcessGroup) -> None:
        """Take the same steps as the process that answers.

        Args:
            content: The server's message.
            group: This process among those that share the batches.
        """


def count_processes(scenario: TrainingScenario) -> int:
    """Count the processes to train with: one for each GPU, or one where they could not share the work.

    Args:
        scenario: Of the run.
    """
    if scenario.device != "cuda" or scenario.pipeline.by_example:
        return 1
    return max(torch.cuda.device_count(), 1)


@contextmanager
def start_helpers(local: SharedTraining, content: RecordDict, processes: int) -> Iterator[ProcessGroup]:
    """Start further processes, which take the same steps as this one, for a while.

    Args:
        local: What they train; they are given a copy of it.
        content: The server's message.
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
        helpers = [
            spawn.Process(target=_help, args=(local, content, ProcessGroup(number, processes), meeting), daemon=True)
            for number in range(1, processes)
        ]
        for helper in helpers:
            helper.start()
        try:
            with join_group(ProcessGroup(0, processes), local.scenario.device, meeting) as group:
                yield group
        finally:
            for helper in helpers:
                helper.terminate()
                helper.join()


def _help(local: SharedTraining, content: RecordDict, group: ProcessGroup, meeting: str) -> None:
    end_with_parent()  # also in the middle of waiting for the others
    if local.scenario.device == "cuda":
        torch.cuda.set_device(group.number)
    with join_group(group, local.scenario.device, meeting):
        local.help(content, group)
