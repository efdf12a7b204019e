"""Rows per second of the store, at the start and at the end of many trials, and seconds to read them all.

``python -m fedmjp.benchmarks.performance.store --trials 100000 --json FILE [--url URL]``

Writes to a SQLite file in a temporary folder, or to the empty database that the URL names.
"""

import hashlib
import random
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean, quantiles
from typing import Annotated, Any

import typer

from fedmjp import provenance
from fedmjp.benchmarks.folder.store import Store, Trial
from fedmjp.benchmarks.scripts import Json, keep_figures, timed
from fedmjp.errors import BadInputError
from fedmjp.running import run_function

BATCH = 16
METRICS = ("mse", "psnr", "ssim", "fft2d", "fft2d_magnitude", "lpips_alex", "lpips_vgg", "lpips_squeeze")
SEED = 0


def main(
    json: Json,
    trials: Annotated[int, typer.Option(min=20 * BATCH, help="How many.")] = 100_000,
    url: Annotated[str | None, typer.Option(help="An empty database instead of a SQLite file.", metavar="URL")] = None,
) -> None:
    """Measure, print and write."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trials.sqlite"
        store = Store.at(path) if url is None else Store.open(url)
        if store.counts():
            raise BadInputError(f"{store.name} holds trials; name an empty database")
        figures: dict[str, Any] = measure(store, trials)
        store.close()
        if url is None:
            figures["megabytes"] = round(path.stat().st_size / 1e6, 1)
    kind = "SQLite" if url is None else "PostgreSQL"
    keep_figures(json, figures, {"database": kind, "trials": trials, "batch": BATCH})


def measure(store: Store, trials: int) -> dict[str, float]:
    """Rows per second of the first and last tenth of the puts, and seconds of readings.

    Other work on the machine slows some puts down; ``last_to_first_put`` compares the fastest tenths of both.
    """
    environment = provenance.environment()
    chance = random.Random(SEED)  # noqa: S311 (filler, no secret)
    keys = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(trials)]
    seconds = []
    for start in range(0, trials, BATCH):
        rows = [_trial(key, environment, chance) for key in keys[start : start + BATCH]]
        seconds.append(timed(partial(store.put, rows))[1])
    tenth = len(seconds) // 10
    first, last = seconds[:tenth], seconds[-tenth:]
    readings: dict[str, Callable[[], object]] = {
        "finished": partial(store.finished, keys),
        "frame": store.frame,
        "frame_of_keys": partial(store.frame, keys),
        "trials": partial(store.trials, keys),
        "counts": store.counts,
    }
    return {
        "rows_per_second_first_tenth": round(BATCH / mean(first)),
        "rows_per_second_last_tenth": round(BATCH / mean(last)),
        "last_to_first_put": round(quantiles(last, n=10)[0] / quantiles(first, n=10)[0], 2),
        **{f"{name}_seconds": round(timed(read)[1], 2) for name, read in readings.items()},
    }


def filler(key: str, environment: Mapping[str, Any], **known: Any) -> Trial:
    """A finished trial of no attack, with what is known of it and anything else in the other columns."""
    columns = {
        "model": "deit_small",
        "defence": "mjp",
        "mask_ratio": 0.27,
        "attack": "gradient_matching",
        "setting": "a",
        "protocol": "float",
        "picture_sha256": key,
        "seed": SEED,
        "realised_ratio": 0.27,
        "weights_sha256": "0",
        "attack_seconds": 0.1,
        "diagnostics": {},
    }
    return Trial(key=key, status="ok", environment=environment, **{**columns, **known})


def _trial(key: str, environment: Mapping[str, Any], chance: random.Random) -> Trial:
    return filler(
        key,
        environment,
        picture=f"n01440764/ILSVRC2012_val_{chance.randrange(50_000):08}",
        realised_ratio=chance.random(),
        weights_sha256=key,
        attack_seconds=chance.random(),
        scores={metric: chance.random() for metric in METRICS},
        diagnostics={"iterations": 1000, "loss": [chance.random() for _ in range(20)], "restarts": 1},
    )


if __name__ == "__main__":
    run_function(main)
