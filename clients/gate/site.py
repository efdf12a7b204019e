"""Gated programs of Flower: a SuperNode whose uploads the site's policy judges, whatever apps do."""

import os
import shlex
import sys
from pathlib import Path

from fedmjp.clients.gate.acceptance import require_accepted
from fedmjp.clients.gate.ledger import GateLedger
from fedmjp.clients.gate.node import NodeGate
from fedmjp.clients.gate.policy import Policy
from fedmjp.clients.gate.program import POLICY_VARIABLE, PROGRAM
from fedmjp.clients.gate.watchdog import run_to_the_end
from fedmjp.hosts import require_resolved

SERVER_OPTION = "--superlink"


def run_supernode(policy_file: Path, arguments: list[str]) -> None:
    """Run ``flower-supernode`` with both gates; the process ends with it, but for an error before the start.

    Args:
        policy_file: The site's policy.
        arguments: Of ``flower-supernode``.

    Raises:
        ConfigError: If the policy is none, changed since it was accepted, or its ledger cannot lie where it says.
        FederationError: If the server's name does not resolve.
    """
    if SERVER_OPTION in arguments[:-1]:
        require_resolved(arguments[arguments.index(SERVER_OPTION) + 1])
    policy, path = Policy.read(policy_file)
    ledger = GateLedger(path)
    require_accepted(policy_file, ledger)
    programs = write_programs(policy_file, path)
    os.environ["PATH"] = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    NodeGate(policy, ledger).install()
    from flwr.supernode.cli import flower_supernode  # noqa: PLC0415 (reads sys.argv and the functions just replaced)

    sys.argv = ["flower-supernode", *arguments]
    run_to_the_end(flower_supernode)


def write_programs(policy_file: Path, ledger: Path) -> Path:
    """Write the program that Flower starts for each task into a folder beside the ledger.

    Args:
        policy_file: The site's policy.
        ledger: Of the policy.

    Returns:
        The folder, which comes first on the PATH.
    """
    folder = ledger.with_name(ledger.name + ".programs").absolute()
    folder.mkdir(mode=0o700, exist_ok=True)
    program = folder / PROGRAM
    code = "from fedmjp.clients.gate.program import run_clientapp; run_clientapp()"
    words = ["env", f"{POLICY_VARIABLE}={policy_file.absolute()}", sys.executable, "-P", "-c", code]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o700)
    return folder
