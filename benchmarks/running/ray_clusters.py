"""Where workers run: a Ray of the run's own on this machine, or a cluster that is already running.

Ray's variables are read once, when it is imported: this module belongs into a process that serves one run.
"""

import logging
import math
import os
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc  # type: ignore[import-untyped]
import ray
import torch
from ray._private.grpc_utils import init_grpc_channel
from ray.exceptions import AuthenticationError

import fedmjp
from fedmjp import provenance
from fedmjp.benchmarks.private_ray import RayError
from fedmjp.benchmarks.running.ray_workers import Assignment, RayTeam
from fedmjp.benchmarks.running.workbench import Setup
from fedmjp.errors import BadInputError, ConfigError

CODE = Path(fedmjp.__file__).resolve().parent
LOCAL = "local"  # as Ray calls what it starts itself
PATIENCE = 10  # seconds that a cluster has to answer
OBJECTS = 100_000_000  # bytes that jobs and results may take while they travel on one machine
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # no word about what a later Ray will do
}
ON_THIS_MACHINE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}  # else Ray's agents outlive a killed run by a minute
CHECK = "/ray.rpc.NodeInfoGcsService/GetClusterId"  # what a cluster with authentication refuses to strangers
TOKEN = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"  # noqa: S105


@contextmanager
def local_team(setup: Setup, workers: int) -> Iterator[RayTeam]:
    """Start a Ray on this machine, which ends with the run, however that ends.

    Args:
        setup: Of the run.
        workers: Number of processes.

    Raises:
        RayError: If Ray would listen beyond this machine.
    """
    os.environ.update(ON_THIS_MACHINE)
    gpus = torch.cuda.device_count() if setup.device == "cuda" else 0
    threads = setup.threads or max(1, provenance.hardware()["cores"] // workers)
    with _connected(LOCAL, num_cpus=workers, num_gpus=gpus, object_store_memory=OBJECTS, include_dashboard=False):
        address = ray.util.get_node_ip_address()
        if not ip_address(address).is_loopback:
            raise RayError(f"Ray listens on {address}, not on this machine alone; leave --workers out")
        kind, share = ("GPU", 1 / math.ceil(workers / gpus)) if gpus else ("CPU", 1)
        yield RayTeam(Assignment.of(setup, threads), kind, share)


@contextmanager
def cluster_team(setup: Setup, address: str) -> Iterator[RayTeam]:
    """Have workers on a cluster, as many as it has cores, or GPUs on CUDA.

    Args:
        setup: Of the run.
        address: HOST:PORT of the cluster's head.

    Raises:
        BadInputError: If it does not answer, or cannot do this work.
    """
    _knock(address)
    with TemporaryDirectory(prefix="fedmjp-") as folder:  # what Ray packs follows links
        (Path(folder) / CODE.name).symlink_to(CODE)
        environment = {"working_dir": folder, "excludes": ["__pycache__"]}
        with _connected(address, runtime_env=environment):
            yield _team_on_cluster(setup)


def _team_on_cluster(setup: Setup) -> RayTeam:
    kind = "GPU" if setup.device == "cuda" else "CPU"
    if not int(ray.cluster_resources().get(kind, 0)):
        raise BadInputError(f"the Ray cluster has no {kind}; take another --device")
    return RayTeam(Assignment.of(setup, setup.threads or 1).travelling(), kind, 1)


@contextmanager
def _connected(address: str, **options: Any) -> Iterator[None]:
    """Connect to Ray; at the end disconnect, which ends our workers and leaves a cluster running."""
    os.environ.update(ENVIRONMENT)
    try:
        # Workers import from where Ray was joined: there a user's own folder could have the name of our package.
        with chdir(CODE.parent):
            ray.init(address, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, OSError, RuntimeError, ValueError, AuthenticationError) as error:
        reason = str(error).partition("\n")[0]
        if address == LOCAL:
            raise RayError(f"Ray could not be started on this machine: {reason}") from None
        raise BadInputError(f"the Ray cluster at {address} cannot be joined: {reason}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Refuse an address where nothing answers, or that asks for another token: Ray itself would try for long."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--ray {address!r} is not of the form HOST:PORT")
    with init_grpc_channel(address) as channel:  # with the user's token
        try:
            grpc.channel_ready_future(channel).result(timeout=PATIENCE)
            channel.unary_unary(CHECK)(b"", timeout=PATIENCE)
        except grpc.FutureTimeoutError:
            raise BadInputError(
                f"no Ray cluster answered at {address} within {PATIENCE} s; start one with `ray start --head`"
            ) from None
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise BadInputError(f"the Ray cluster at {address} asks for a token: {TOKEN}") from None
