"""Loaded at the start of every Python process of a test run: notes who touches which record folder.

Each note says whether the process runs the ServerApp, the ClientApp or neither, and where it was.
"""

import os
import sys

RUN = os.environ["AUDIT_RUN"]
NOTES = os.environ["AUDIT_NOTES"]


def note(event: str, arguments: tuple[object, ...]) -> None:
    """Audit hook: write down file-system events in the evaluator's and the server's folder."""
    if event == "import":
        return
    for folder in ("evaluator", "uploads"):
        if any(str(argument).startswith(f"{RUN}/{folder}") for argument in arguments):
            server, client = ("fedmjp.server.app" in sys.modules), ("fedmjp.clients.app" in sys.modules)
            role = "server" if server else "client" if client else "launcher"
            handle = os.open(NOTES, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(handle, f"{role} {folder} {event}\n".encode())
            os.close(handle)


sys.addaudithook(note)
