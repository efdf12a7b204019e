"""The terminal that commands write to."""

from rich.console import Console

from fedmjp.texts import printable

FILE_WIDTH = 140


def wide_console() -> Console:
    """Open the terminal as wide as it is; make files and pipes wide enough for every column."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def tell(console: Console, *lines: str, style: str | None = None) -> None:
    """Print lines as they are: no markup, no colours of their own, never broken.

    Args:
        console: The terminal.
        lines: To print.
        style: Of all of them, such as "bold red".
    """
    for line in lines:
        console.print(printable(line), style=style, highlight=False, markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Write a time in words: 12 s, 3 min, 2 h 05 min.

    Args:
        seconds: At least 0.
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
