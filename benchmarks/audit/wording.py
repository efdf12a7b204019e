"""The report's figures in words that somebody who runs no attacks understands; ``report.json`` has them as they are."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

SCALE = "In decibels (PSNR): from about 20 on a picture is recognisable, from 40 on it is exact."


def result(row: Mapping[str, Any]) -> str:
    """Describe what came back of one attack on one upload.

    Args:
        row: Scores of the attack.
    """
    if row["reveals"] == "pictures":
        return (
            f"{row['above_floor']} of {row['pictures']} come back: "
            f"{figure(row['psnr_worst_case'], row.get('floor_of_best'), 'dB')}; median {row['psnr_median']:.1f} dB, "
            f"their mean colour alone {row['floor_median']:.1f} dB"
        )
    if row["reveals"] == "classes":
        return (
            f"{row['named']} of {row['classes']} classes rose, {row['right']} of them among the {row['held']} that the "
            "client holds"
        )
    parts = []
    if "tokens" in row:
        parts.append(
            f"{row['tokens_right']} of the {row['tokens']} different tokens of the texts, and "
            f"{row['tokens_named'] - row['tokens_right']} wrong ones; {row['tokens_floor']:.1%} of the "
            f"{row['vocabulary']} tokens there are would be right by chance"
        )
    if "labels_right" in row:
        parts.append(f"{row['labels_right']:.0%} of {row['labels']} labels right, a guess {row['labels_floor']:.0%}")
    if "features" in row:
        parts.append(f"{row['features_near']} of {row['features']} features come back")
    return "; ".join(parts)


def figure(best: float | None, floor: float | None, unit: str) -> str:
    """Write the best figure of an attack with what a blank guess gets beside it; empty without a figure.

    Args:
        best: PSNR of a picture in dB, or an error.
        floor: The same of a guess that knows nothing but a mean.
        unit: ``dB``, or in words what else the figure is.
    """
    if best is None:
        return ""
    text, beside = (
        "" if value is None else f"{value:.1f}" if unit == "dB" else f"{value:.2g}" for value in (best, floor)
    )
    text = f"best {text} dB" if unit == "dB" else f"best {unit} {text}"
    return f"{text}; a blank guess gets {beside}" if beside else text


def count_of(number: int, noun: str) -> str:
    """Write a number with its noun.

    Args:
        number: At least 1.
        noun: In the singular.
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def describe_curve(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say how much came back of fewer records in one step and of one record in more steps; empty where none was known.

    Args:
        rows: Of the report's ``counterfactual``.
    """
    parts: list[str] = []
    axes = (("pictures", "steps", "record", "in one step"), ("steps", "pictures", "step", "on one record"))
    for size, single, noun, where in axes:
        known = sorted((row for row in rows if row[single] == 1 and row["came_back"] is not None), key=itemgetter(size))
        returned = [row for row in known if row["came_back"]]
        empty = [row for row in known if not returned or row[size] > returned[-1][size]]
        if returned and (returned[-1][size] > 1 or size == "pictures"):
            last = returned[-1]
            count = f"{last['came_back']} of {count_of(last['of'], last['kind'].removesuffix('s'))}"
            parts.append(f"{count} with {count_of(last[size], noun)} {where}")
        if empty:
            parts.append(f"none with {count_of(empty[0][size], noun)} {where}{' or more' * (len(empty) > 1)}")
    return f"A smaller update, of the app's own step, gives back: {'; '.join(parts)}." if parts else ""


def step(values: Mapping[str, Any] | None) -> str:
    """Say in a sentence what one update is made of; empty where no training was seen.

    Args:
        values: Of the report's ``step``.
    """
    if values is None:
        return ""
    steps, examples = values["steps"], values["pictures"]
    passes = f", seen {values['passes']:g} times each," if values["passes"] > 1 else ""
    process = f"{steps} step{'s' * (steps != 1)} of {values['optimiser']}" if steps else "a gradient"
    return (
        f"One update is {process} over {examples} example{'s' * (examples != 1)}{passes} in batches of up to "
        f"{values['batch_size']}."
    )


def made(report: Mapping[str, Any]) -> str:
    """Say which app was looked at, when, and by which version and commit of this project.

    Args:
        report: As ``report.json`` holds it.
    """
    revision = report["made_by"]["revision"]
    commit = f", commit {revision['commit'][:10]}" if revision["commit"] else ""
    changed = " with local changes" if revision["modified"] else ""
    watched = f"{report['rounds']} round{'s' * (report['rounds'] != 1)} of {report['clients']} clients"
    version = report["made_by"]["versions"]["fedmjp"]
    return f"{report['app']}, {watched}, {report['date'][:10]}, fedmjp {version}{commit}{changed}."


def controls(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Group what the server controls: values of one record that mean the same stand together.

    Args:
        rows: Of the report.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        record, _, name = str(row["name"]).rpartition(".") if row["what"] == "configuration" else (row["name"], "", "")
        values = groups.setdefault((record, row["meaning"]), [])
        if name:
            values.append(f"{name} = {row['value']}")
    return [
        {"name": record, "values": ", ".join(values), "meaning": meaning}
        for (record, meaning), values in groups.items()
    ]


def recipe(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the recipe that was seen, a line for each part that says something.

    Args:
        values: Of the recipe.
    """
    if not values["trains"]:
        yield "training", values["why"]
        return
    yield "network", values["model"]
    yield "optimiser", values["optimiser"]
    if values["learning_rates"]:
        yield "learning rate", ", ".join(f"{rate:g}" for rate in values["learning_rates"])
    for name in ("momentum", "weight_decay"):
        if values[name]:
            yield name.replace("_", " "), f"{values[name]:g}"
    if len(values["groups"]) > 1:
        yield "groups of parameters, each with rates and decay of its own", str(len(values["groups"]))
    yield "steps of a client in a round", str(values["steps"])
    if values["passes"] > 1:
        yield "passes over its examples", f"{values['passes']:g}"
    yield "batches", ", ".join(f"{count} of {size}" for size, count in values["batch_sizes"].items())
    if values["loss"]:
        smoothing = values["loss"]["label_smoothing"]
        yield "loss", values["loss"]["name"] + (f", label smoothing {smoothing:g}" if smoothing else "")
    if values["range"] and tuple(values["range"]) != (0.0, 1.0):
        yield "pictures are taken in their own range", f"{values['range'][0]:g} to {values['range'][1]:g}"
    if values["normalisation"]:
        mean, std = (", ".join(f"{value:g}" for value in values["normalisation"][key]) for key in ("mean", "std"))
        yield "pictures enter the network", f"less {mean}, divided by {std}"


def unusual(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe values in clear that are larger than a metric needs, a sentence for each record.

    Args:
        entries: Of the report.
    """
    sentences = []
    for record in dict.fromkeys(entry["record"] for entry in entries):
        of_record = [entry for entry in entries if entry["record"] == record]
        sentences.append(
            f"In {record}, {', '.join(entry['name'] for entry in of_record)} hold more than a metric or a setting "
            f"needs: up to {max(entry['size'] for entry in of_record):,} numbers or bytes."
        )
    return sentences
