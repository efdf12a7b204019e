"""Runs what is missing of a prepared campaign, where and with how many processes it is asked to."""

import time

import torch

from benchmarks.campaign.prepare import Prepared
from benchmarks.folder.output import OutputFolder
from benchmarks.running.ray_workers import run_ray
from benchmarks.running.workers import JobProgress, Setup, run_local

SECONDS_PER_HOUR = 3600


def run_campaign(
    prepared: Prepared, output: OutputFolder, progress: JobProgress, *, database: str, workers: int, ray: str
) -> int:
    """Work it off, within its budget.

    Args:
        prepared: The campaign.
        output: Its folder.
        progress: Is told what happens.
        database: URL of the trials; the folder's own file if empty.
        workers: Processes on this machine; 0 means one per GPU, or one on CPU.
        ray: Address of a cluster that works instead; none if empty.

    Returns:
        Trials that the budget left for another run.
    """
    setup = Setup(
        output=output,
        database=database,
        experiments=tuple(part.experiment for part in prepared.plan.parts),
        selection=prepared.selection,
        keep=prepared.campaign.keep,
    )
    hours, began = prepared.campaign.budget.hours, time.monotonic()

    def spent() -> bool:
        return hours is not None and time.monotonic() - began > hours * SECONDS_PER_HOUR

    if ray:
        return run_ray(prepared.plan, setup, address=ray, progress=progress, stop=spent)
    gpus = torch.cuda.device_count() if setup.device == "cuda" else 1
    return run_local(prepared.plan, setup, workers=workers or max(1, gpus), progress=progress, stop=spent)
