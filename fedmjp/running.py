"""Run commands: an error is told in one line, not as a traceback."""

import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click
import typer
from rich.console import Console
from rich.text import Text

from fedmjp.errors import OUT_OF_MEMORY, FedmjpError, out_of_memory
from fedmjp.texts import printable

FAILED = 1
BAD_INPUT = 2
KEPT = "whatever was finished is kept, and the same command goes on with the rest"
INTERRUPTED = 130  # how typer ends a command on Ctrl-C


def run(app: typer.Typer) -> NoReturn:
    """Run the command that the arguments name; an error raised on purpose becomes one line and its exit code.

    Args:
        app: With all commands.
    """
    try:
        code = app(standalone_mode=False)
    except FedmjpError as error:
        code = _tell(str(error), error.exit_code)
    except OSError as error:
        code = _tell(f"{error.filename or 'input/output'}: {error.strerror or error}", BAD_INPUT)
    except click.exceptions.NoArgsIsHelpError as error:
        code = error.exit_code  # the help was printed
    except click.ClickException as error:
        code = _tell(error.format_message(), error.exit_code)
    except Exception as error:
        if not out_of_memory(error):
            raise
        code = _tell(f"{OUT_OF_MEMORY}; {KEPT}", FAILED)
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would interrupt the end, with a traceback
        _tell("interrupted; whatever was finished is kept", INTERRUPTED)
    sys.exit(code)


def run_function(function: Callable[..., Any]) -> NoReturn:
    """Run a script's only command.

    Args:
        function: The command, as typer takes it.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(function)
    run(app)


def _tell(error: str, code: int) -> int:
    Console(stderr=True).print(Text("Error: ", "bold red") + Text(printable(error)), soft_wrap=True)
    return code
