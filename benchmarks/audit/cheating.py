"""What a server that changes weights would get of the app's own network: every one that this project has, or why not.

It is played here, in this process, on bundled pictures: nothing is sent to the app's clients but what their server
sends. The clients of the play defend their updates as the app's mods do, where these are defences of this project.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fedmjp.attacks.adversary import Adversary
from fedmjp.benchmarks.audit.evaluating import ABOVE_FLOOR, score_pictures
from fedmjp.benchmarks.audit.network import Network
from fedmjp.benchmarks.audit.recipe import optimiser_of, unreadable
from fedmjp.benchmarks.audit.wording import figure
from fedmjp.data.pictures import LabelledPicture
from fedmjp.defences.local_dp import LocalDp
from fedmjp.errors import FedmjpError
from fedmjp.facade import bundled_pictures
from fedmjp.models.build import with_weights
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Reconstruction
from fedmjp.scenario import Scenario
from fedmjp.threat import SERVERS

# Labels of the pictures that a server is played on; others take what comes first of theirs.
LABELS = {"feature_fishing": (0, 0, 1)}
TWO = (0, 1)
STATED = {"class_fishing": "class_fishing:class=0"}
IN_A_SUM = ("suppression",)  # of servers that take one client out of a sum; the others take a picture out of a batch
IMPRINT = "token_imprint"
HARMLESS = ("message_size_mod", "parameters_size_mod")  # of Flower: they measure


def play_servers(
    network: Network, recipe: Mapping[str, Any], kind: str, mods: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Play every server against the app's network, with the update that its clients send.

    Args:
        network: The app's, with the weights that the server sent.
        recipe: Of the clients' training.
        kind: Kind of the answers, such as weights or gradient.
        mods: Of the app's clients, see ``fedmjp.benchmarks.audit.protections.read_mods``.
    """
    defences = [defence for mod in mods for defence in mod["defences"]]
    is_bounded = any(defence["name"] == LocalDp.name for defence in defences)  # searches get through the others
    absent = [mod["mod"] for mod in mods if not mod["defences"] and mod["mod"] not in HARMLESS]
    unlike = [f"it met none of {', '.join(absent)}, mods of the app that were not played"] if absent else []
    if kind == "weights" and recipe["steps"] > 1:
        unlike.append(f"it was played for one step, and clients of this app take {recipe['steps']}")
    met = "" if mods else "; the app has no mods that it could have met"
    rows = []
    for name in SERVERS:
        row = _play(name, network, recipe, kind, defences)
        if defences and row["played"]:
            bare = _play(name, network, recipe, kind, [])
            is_stopped = bare.get("leaks", False) and not row["leaks"]
            row |= {"is_stopped": is_stopped and is_bounded, "psnr_undefended": bare.get("psnr")}
        row["said"] += met if row["played"] else ""
        rows.append({"server": name, **row, "unlike": "; ".join(unlike) or None})
    return rows


def _play(
    name: str, network: Network, recipe: Mapping[str, Any], kind: str, defences: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    if why := unreadable(recipe, kind):
        return _not_played(f"clients of this app answer with what no equation reads: {why}")
    if not isinstance(network.seen, VitClassifier):
        return _not_played(f"it changes vision transformers: {network.why}")
    try:
        return _measure(name, network.seen, recipe, kind, defences)
    except (FedmjpError, ArithmeticError, RuntimeError) as error:  # of numbers that no audit chose
        return _not_played((str(error).splitlines() or [type(error).__name__])[0])


def _not_played(reason: str) -> dict[str, Any]:
    return {"played": False, "said": reason}


def _measure(
    name: str, model: VitClassifier, recipe: Mapping[str, Any], kind: str, defences: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    summed = name in IN_A_SUM
    labels = LABELS.get(name, TWO)
    values: dict[str, Any] = {
        "model": {
            "name": "deit_tiny",
            "image_size": model.image_size,
            "patch_size": model.patch_size,
            "classes": len(model.get_parameter("backbone.head.bias")),
        },
        "server": STATED.get(name, name),
        "batch_size": 1 if summed else len(labels),
        "pictures_per_client": 1 if summed else len(labels),
        "update": "gradient",
        "defences": [*defences, *(["secure_sum:clients=2"] if summed else [])],
    }
    if summed:
        values["clients"] = 2
    if kind == "weights":
        values |= {"update": "delta", "local_learning_rate": recipe["learning_rate"], **optimiser_of(recipe)}
    scenario = Scenario.parse(values)
    scenario.require_server(model)
    pictures = [
        LabelledPicture(picture.name, picture.image, label)
        for picture, label in zip(bundled_pictures(len(labels), size=model.image_size), labels, strict=True)
    ]
    exchange = scenario.exchange(pictures, model=model)
    changed = with_weights(model, exchange.changed[0])
    attack = IMPRINT if name == IMPRINT else "patch_embedding_wiener" if defences else "patch_embedding"
    disclosed = Adversary(changed, scenario.threat, 0).reconstruct(
        attack, [exchange.upload], {}, on_progress=lambda *_: None
    )[0]
    targets = scenario.wanted(labels)
    assert isinstance(disclosed, Reconstruction)  # noqa: S101 (both attacks reveal pictures)
    scores = score_pictures(disclosed, exchange.private.clean[targets])
    best = max(scores, key=lambda score: score["psnr"])
    behind = "a sum of two clients" if summed else f"a batch of {len(labels)}"
    leaks = best["psnr"] > best["floor"] + ABOVE_FLOOR
    met = f"behind {', '.join(str(defence['name']) for defence in defences)} " if defences else ""
    result = "a picture" if leaks else "no picture"
    sentence = f"{attack} gets {result} out of {behind} {met}({figure(best['psnr'], best['floor'], 'dB')})"
    return {
        "played": True,
        "said": sentence,
        "psnr": round(best["psnr"], 2),
        "floor": round(best["floor"], 2),
        "leaks": leaks,
    }
