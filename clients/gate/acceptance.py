"""Which policy a ledger was written under: one that changed since is not in force before the site says so."""

import hashlib
from pathlib import Path

from fedmjp.clients.gate.ledger import Entry, GateLedger
from fedmjp.errors import ConfigError

KIND = "policy"  # of the ledger's entries


def accept_policy(policy_file: Path, ledger: GateLedger) -> str:
    """Write the policy's digest to the ledger; from then on it is in force.

    Args:
        policy_file: The site's policy.
        ledger: Of the policy.

    Returns:
        SHA-256 of the file.

    Raises:
        DefenceError: If the ledger cannot be written.
    """
    digest = _digest(policy_file)
    ledger.append(Entry(place="node", run=0, round="", kind=KIND, verdict="passed", policy=digest))
    return digest


def require_accepted(policy_file: Path, ledger: GateLedger) -> None:
    """Refuse a policy that changed since the ledger's last entry; a ledger without entries takes any.

    Args:
        policy_file: The site's policy.
        ledger: Of the policy.

    Raises:
        ConfigError: If the policy is not the one that was accepted last.
        DefenceError: If the ledger is damaged.
    """
    entries = ledger.entries() if ledger.path.exists() else []
    if not entries:
        accept_policy(policy_file, ledger)
        return
    accepted = next((entry.policy for entry in reversed(entries) if entry.kind == KIND), "no policy")
    if accepted != (digest := _digest(policy_file)):
        raise ConfigError(
            f"{policy_file} (SHA-256 {digest[:16]}) is not what was accepted last ({accepted[:16]}): if it was you who "
            f"changed it, run fedmjp gate accept --policy {policy_file}; if not, an app did"
        )


def _digest(policy_file: Path) -> str:
    return hashlib.sha256(policy_file.read_bytes()).hexdigest()
