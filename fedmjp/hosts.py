"""Names of servers."""

import socket

from fedmjp.errors import FederationError


def require_resolved(address: str) -> None:
    """Check that the name of a server leads to an address.

    Args:
        address: HOST:PORT; a host that is an address itself needs no look-up.

    Raises:
        FederationError: If the name does not resolve.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no name"
        raise FederationError(
            f"the server's name {host!r} does not resolve ({reason}): correct it, or this machine's look-up of names"
        ) from None
