"""The command that a run was started with, as results may show it."""

import shlex
import sys
from pathlib import Path

# Where results go says nothing elsewhere, and a database's URL may hold a password.
LEFT_OUT = ("--output", "--database")


def published_command() -> str:
    """The command line of this process, without those options and without this machine's folders."""
    words: list[str] = []
    arguments = iter(sys.argv[1:])
    for word in arguments:
        name, equals, _ = word.partition("=")
        if name not in LEFT_OUT:
            words.append(_without_folder(word))
        elif not equals:
            next(arguments, None)
    return shlex.join(["fedmjp", *words])


def _without_folder(word: str) -> str:
    key, equals, value = word.partition("=")
    if equals and Path(value).is_absolute():
        return f"{key}={Path(value).name}"
    return Path(word).name if Path(word).is_absolute() else word
