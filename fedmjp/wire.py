"""The agreement of clients and server: names in messages, places of records."""

from pathlib import Path

from fedmjp.files import HALF_WRITTEN

ARRAYS = "arrays"  # Flower's name: parameters, or their gradients
BUFFERS = "buffers"  # a model's running statistics, which no strategy may take a step along
METRICS = "metrics"  # Flower's name
EXAMPLES = "num-examples"  # Flower's name: what a mean over clients is weighted by
CORRECT, UNDECIDED, LOSS = "correct", "undecided", "loss"  # of an evaluation at a site, beside its examples
COUNTS = (EXAMPLES, "pictures", "skipped")
REPORTED = (*COUNTS, "loss", "learning-rate", "seconds", "upload-seconds")  # metrics of every reply in training
EVENTS = "events.jsonl"  # in a run's folder: what the server's app says of its progress, an event a line
# Files of uploads, of what is behind them and of what waits beside them, in the folders of a recording.
RECORD_FILES = rf"(round|weights)-[0-9a-z-]+\.safetensors|\d+\.safetensors|refused\.csv|{HALF_WRITTEN}"
REFUSED = 1000  # the code of a client's refusal; Flower leaves codes from here on to apps


def round_folder(records: Path, server_round: int) -> Path:
    """Return the folder of a round that is recorded.

    Args:
        records: Folder of all rounds.
        server_round: From 1.
    """
    return records / f"round-{server_round:05d}"


def uploads_folder(records: Path, server_round: int) -> Path:
    """Return the folder in which the server keeps the uploads of a round that is recorded.

    Args:
        records: Folder of all rounds.
        server_round: From 1.
    """
    return round_folder(records, server_round) / "uploads"


def evaluator_folder(records: Path, server_round: int) -> Path:
    """Return the folder in which clients leave the private pictures behind uploads, for the evaluator alone.

    Args:
        records: Folder of all rounds.
        server_round: From 1.
    """
    return round_folder(records, server_round) / "evaluator"
