"""Gated programs of Flower: a SuperNode whose uploads the site's policy judges, whatever apps do."""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from clients.gate.flower import wrap_loaded_app
from clients.gate.ledger import GateLedger
from clients.gate.mod import AFTER, UploadGate
from clients.gate.node import NodeGate
from clients.gate.policy import Policy
from clients.gate.trying import EXACT

POLICY_VARIABLE = "FEDMJP_GATE_POLICY"
PROGRAM = "flwr-clientapp"
OURS = frozenset({"attacks", "benchmarks", "clients", "fedmjp", "server"})


def run_supernode(policy_file: Path, arguments: list[str]) -> None:
    """Run ``flower-supernode`` with both gates; it returns only by an error before the start.

    Raises:
        ConfigError: If the policy is none, or its ledger cannot lie where it says.
    """
    policy, path = Policy.read(policy_file)
    ledger = GateLedger(path)
    programs = write_programs(policy_file, path)
    os.environ["PATH"] = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    NodeGate(policy, ledger).install()
    from flwr.supernode.cli import flower_supernode  # noqa: PLC0415 (reads sys.argv and the functions just replaced)

    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def write_programs(policy_file: Path, ledger: Path) -> Path:
    """The folder beside the ledger with the program that Flower starts for each task: it comes first on the PATH."""
    folder = ledger.with_name(ledger.name + ".programs").absolute()
    folder.mkdir(mode=0o700, exist_ok=True)
    program = folder / PROGRAM
    code = "from clients.gate.site import run_clientapp; run_clientapp()"
    words = ["env", f"{POLICY_VARIABLE}={policy_file.absolute()}", sys.executable, "-P", "-c", code]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o700)
    return folder


def run_clientapp() -> None:
    """Run ``flwr-clientapp`` with the gate around whatever bundle it loads."""
    gate = UploadGate(os.environ[POLICY_VARIABLE])
    _load_what_is_needed(gate.policy)
    modules = _Modules()

    class Gated(ClientApp):
        """A bundle's ClientApp behind the gate."""

        def __init__(self, app: ClientApp) -> None:
            super().__init__()
            self._app = app

        def __call__(self, message: Message, context: Context) -> Message:
            modules.exchange()
            try:
                return gate(message, context, self._call_app)
            finally:
                modules.exchange()

        def _call_app(self, message: Message, context: Context) -> Message:
            modules.exchange()
            try:
                return self._app(message, context)
            finally:
                modules.exchange()

    wrap_loaded_app(Gated)
    from flwr.supernode.cli import flwr_clientapp  # noqa: PLC0415 (reads sys.argv)

    sys.argv[0] = PROGRAM
    modules.exchange()
    flwr_clientapp()


def _load_what_is_needed(policy: Policy) -> None:
    """Import what is else imported when it is first used: a bundle may hold modules of the same names."""
    import fedmjp  # noqa: PLC0415

    for name in {*EXACT, *AFTER[:1], *([policy.search.attack] if policy.search.every else [])}:
        fedmjp.ATTACKS.get(name)
    fedmjp.recover  # noqa: B018 (loaded when it is first used)
    if policy.multiplier is not None:
        import fedmjp.defences.accounting  # noqa: PLC0415


class _Modules:
    """The modules of this package, out of the way while a bundle's code runs: it may have packages of these names."""

    def __init__(self) -> None:
        self._away: Mapping[str, ModuleType] = {}

    def exchange(self) -> None:
        """Put away those that are there, and back those that were away."""
        there = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in OURS}
        for name in there:
            del sys.modules[name]
        known: Any = sys.modules
        known.update(self._away)
        self._away = there
