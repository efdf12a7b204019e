"""What a SuperNode starts for each task: Flower's own program, with the gate around whatever bundle it loads.

Flower takes a task away from a process that says nothing for thirty seconds. The gate's imports take several, on a busy
machine more: they come when the process has said that it lives.
"""

import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedmjp.clients.gate.flower import wrap_loaded_app

if TYPE_CHECKING:
    from fedmjp.clients.gate.policy import Policy

POLICY_VARIABLE = "FEDMJP_GATE_POLICY"
PROGRAM = "flwr-clientapp"
OURS = frozenset({"attacks", "benchmarks", "clients", "fedmjp", "server"})


def run_clientapp() -> None:
    """Run ``flwr-clientapp`` with the gate around whatever bundle it loads."""
    wrap_loaded_app(_behind_gate)
    from flwr.supernode.cli import flwr_clientapp  # noqa: PLC0415 (reads sys.argv)

    sys.argv[0] = PROGRAM
    flwr_clientapp()


def _behind_gate(load: Callable[[], ClientApp]) -> ClientApp:
    """Put a bundle's ClientApp behind the gate of the site's policy."""
    from fedmjp.clients.gate.mod import UploadGate  # noqa: PLC0415 (seconds of imports)

    gate = UploadGate(os.environ[POLICY_VARIABLE])
    _load_what_is_needed(gate.policy)
    modules = _Modules()
    modules.exchange()
    app = load()
    modules.exchange()

    class Gated(ClientApp):
        """Calls the app with its own modules, and the gate with ours."""

        def __call__(self, message: Message, context: Context) -> Message:
            return gate(message, context, self._call_app)

        def _call_app(self, message: Message, context: Context) -> Message:
            modules.exchange()
            try:
                return app(message, context)
            finally:
                modules.exchange()

    return Gated()


def _load_what_is_needed(policy: "Policy") -> None:
    """Import what is else imported when it is first used: a bundle may hold modules of the same names."""
    import fedmjp  # noqa: PLC0415
    from fedmjp.clients.gate.mod import AFTER  # noqa: PLC0415
    from fedmjp.clients.gate.self_attack import EXACT  # noqa: PLC0415

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
        """Put away our modules that are loaded, and put back those that were away."""
        present = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in OURS}
        for name in present:
            del sys.modules[name]
        loaded: Any = sys.modules
        loaded.update(self._away)
        self._away = present
