"""Loaded at the start of every Python process of a test run: notes who touches the evaluator's folder.

Each note says whether the process runs the ServerApp, the ClientApp or neither.
"""

import os
import sys

EVALUATOR = os.environ["AUDIT_EVALUATOR"]
NOTES = os.environ["AUDIT_NOTES"]


def note(event: str, arguments: tuple[object, ...]) -> None:
    """Audit hook: write down file-system events inside the folder."""
    if event == "import" or not any(str(argument).startswith(EVALUATOR) for argument in arguments):
        return
    server, client = ("server.app" in sys.modules), ("clients.app" in sys.modules)
    role = "server" if server else "client" if client else "evaluator"
    handle = os.open(NOTES, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(handle, f"{role} {event}\n".encode())
    os.close(handle)


sys.addaudithook(note)
