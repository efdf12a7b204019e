"""Flower's SuperLink with a lock: it obeys those who know the secret of the run, which no one else on the machine does.

Started as ``python -m fedmjp.benchmarks.federation.locked_superlink ARGUMENTS``, with the secret in its environment.
Flower by itself runs the app of whoever reaches the port, as the user that started it.
"""

import base64
import hmac
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

MODULE = "fedmjp.benchmarks.federation.locked_superlink"
SECRET = "FEDMJP_SUPERLINK_SECRET"  # noqa: S105 (the name of a variable)
KEY = "flower.account-auth.{address}.{kind}"  # of what `flwr` stores for an account


def write_credentials(home: Path, address: str, secret: str) -> None:
    """Let `flwr` know the secret, as an account that has logged in.

    Args:
        home: Flower's home folder, which nobody else can read.
        address: HOST:PORT of the SuperLink.
        secret: Of the run.
    """
    values = {"authn-type": "oidc", "oidc-access-token": secret, "oidc-refresh-token": secret}
    stored = {
        KEY.format(address=address, kind=kind): base64.b64encode(value.encode()).decode()
        for kind, value in values.items()
    }
    path = home / "credentials.yaml"
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(stored), encoding="utf-8")


def main() -> None:
    """Become the SuperLink."""
    from flwr.common.constant import ACCESS_TOKEN_KEY  # noqa: PLC0415 (of no use to who writes credentials)
    from flwr.supercore.auth.typing import AccountInfo  # noqa: PLC0415
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin  # noqa: PLC0415

    changed: Any = import_module("flwr.superlink.cli.flower_superlink")
    secret = os.environ.pop(SECRET)

    class Lock(NoOpControlAuthnPlugin):
        """Flower's check of accounts: there is one, which knows the secret."""

        def validate_tokens_in_metadata(
            self, metadata: Sequence[tuple[str, str | bytes]]
        ) -> tuple[bool, AccountInfo | None]:
            """Tell whether a request has the secret, and whose it is."""
            token = str(dict(metadata).get(ACCESS_TOKEN_KEY, ""))
            if not hmac.compare_digest(token.encode(), secret.encode()):
                return False, None
            return super().validate_tokens_in_metadata(metadata)

    changed.load_control_authn_plugin = Lock
    changed.flower_superlink()


if __name__ == "__main__":
    main()
