"""The ServerApp where Flower finds it: ``fedmjp.server_app:app``.

Flower loads both apps of a simulation at once, in two threads. In its bundle ``fedmjp`` finds its parts when its
``__init__`` has run, and nothing but an import of the package itself waits for that.
"""

import fedmjp  # noqa: F401 (waits)
from fedmjp.server.app import app

__all__ = ["app"]
