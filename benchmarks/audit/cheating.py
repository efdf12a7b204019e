"""What a server that changes weights would get of the app's own network: every one that this project has, or why not.

It is played here, in this process, on bundled pictures: nothing is sent to the app's clients but what their server
sends.
"""

from collections.abc import Mapping
from typing import Any

from fedmjp.attacks.adversary import Adversary
from fedmjp.benchmarks.audit.evaluating import ABOVE_FLOOR, score_pictures
from fedmjp.benchmarks.audit.network import Network
from fedmjp.benchmarks.audit.recipe import optimiser_of, unreadable
from fedmjp.data.pictures import LabelledPicture
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


def play_servers(network: Network, recipe: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    """Play every server against the app's network, with the update that its clients send.

    Args:
        network: The app's, with the weights that the server sent.
        recipe: Of the clients' training.
        kind: Kind of the answers, such as weights or gradient.
    """
    return [{"server": name, **_play(name, network, recipe, kind)} for name in SERVERS]


def _play(name: str, network: Network, recipe: Mapping[str, Any], kind: str) -> dict[str, Any]:
    if why := unreadable(recipe, kind):
        return _not_played(f"clients of this app answer with what no equation reads: {why}")
    if not isinstance(network.seen, VitClassifier):
        return _not_played(f"it changes vision transformers: {network.why}")
    try:
        return _measure(name, network.seen, recipe, kind)
    except (FedmjpError, ArithmeticError, RuntimeError) as error:  # of numbers that no audit chose
        return _not_played((str(error).splitlines() or [type(error).__name__])[0])


def _not_played(reason: str) -> dict[str, Any]:
    return {"played": False, "said": reason}


def _measure(name: str, model: VitClassifier, recipe: Mapping[str, Any], kind: str) -> dict[str, Any]:
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
    }
    if summed:
        values |= {"clients": 2, "defences": ["secure_sum:clients=2"]}
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
    attack = IMPRINT if name == IMPRINT else "patch_embedding"
    disclosed = Adversary(changed, scenario.threat, 0).reconstruct(
        attack, [exchange.upload], {}, on_progress=lambda *_: None
    )[0]
    targets = scenario.wanted(labels)
    assert isinstance(disclosed, Reconstruction)  # noqa: S101 (both attacks reveal pictures)
    scores = score_pictures(disclosed, exchange.private.clean[targets])
    best = max(scores, key=lambda score: score["psnr"])
    behind = "a sum of two clients" if summed else f"a batch of {len(labels)}"
    sentence = (
        f"{attack} gets a picture out of {behind} at {best['psnr']:.1f} dB; its mean colour {best['floor']:.1f} dB"
    )
    if kind == "weights" and recipe["steps"] > 1:
        sentence += f" (played for one step; clients of this app take {recipe['steps']})"
    return {
        "played": True,
        "said": sentence,
        "psnr": round(best["psnr"], 2),
        "floor": round(best["floor"], 2),
        "leaks": best["psnr"] > best["floor"] + ABOVE_FLOOR,
    }
