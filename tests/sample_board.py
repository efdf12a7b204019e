"""A leaderboard to look at: made-up but plausible numbers, every verdict, two threat models."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from fedmjp.benchmarks.leaderboard.entries import (
    Board,
    BoardEntry,
    Cost,
    Difference,
    Provenance,
    ReportedRow,
    Share,
    Standing,
    Statistics,
    Utility,
)
from fedmjp.benchmarks.leaderboard.headline import headline
from fedmjp.defences.pipeline import Defences, pipeline_of
from fedmjp.settings import Setting
from fedmjp.threat import ThreatModel

MODELS = {"deit_tiny": 72.2, "deit_small": 79.8, "deit_small_april": None}
THREATS = (ThreatModel(), ThreatModel(update="delta", local_steps=5, labels_known=True))
ATTACKS = {"grey": 10.6, "patch_embedding": 19.0, "gradient_matching": 15.0, "oracle_april": 32.0}
ROLES = {"grey": "floor", "oracle_april": "bound"}
DEFENCES = {"none": 0.0, "jigsaw": -2.0, "mjp": -6.0}
RATIOS = {"none": (0.0,), "jigsaw": (0.27,), "mjp": (0.1, 0.27, 0.5)}
SETTINGS = {"none": (Setting.A,), "jigsaw": (Setting.B, Setting.C), "mjp": tuple(Setting)}
NASTY = "<script>alert('x')</script> \"q\" & | \\ _a_ ü %$#{}~^ `c` <img src=x onerror=alert(1)>"
METRICS = ("psnr", "mse", "ssim", "fft2d")
ENVIRONMENT = {
    "versions": {"python": "3.11.9", "fedmjp": "0.1.0", "torch": "2.15.0"},
    "revision": {"commit": "0123456789abcdef", "modified": False},
    "hardware": {"processor": "Some CPU", "cores": 16, "memory_gib": 128.0, "gpus": ["Some GPU"], "system": "Linux"},
}
PROVENANCE = Provenance(
    campaign="sample",
    config_sha256="c" * 64,
    data="bundled",
    pictures_sha256="d" * 64,
    weights_sha256=("e" * 64,),
    seeds=(0, 1),
    environments=(ENVIRONMENT,),
    first="2026-11-20T10:00:00+00:00",
    last="2026-11-20T11:00:00+00:00",
)
REPORTED = (
    ReportedRow(
        source="Ren et al., CVPR 2023, Table 5",
        row="DeiT-S + MJP",
        model="DeiT-S",
        defence="MJP",
        setting=Setting.A,
        attack="APRIL",
        n=50,
        top1=80.5,
        metrics={"psnr": 10.34, "mse": 0.035, "ssim": 0.0212},
        compares_with="deit_small",
        differs="trained weights, ImageNet validation pictures, scored as 8-bit PNG",
    ),
    ReportedRow(
        source="Ren et al., CVPR 2023, Table 5",
        row="ViT-B",
        model="ViT-B",
        defence="none",
        setting=Setting.C,
        attack="APRIL",
        n=50,
        top1=None,
        metrics={"psnr": 40.1, "mse": 0.0925},
        compares_with=None,
        differs="a model that we did not run",
    ),
)


def sample_board(
    *, pictures: int = 20, models: Sequence[str] = tuple(MODELS), extra: Sequence[BoardEntry] = ()
) -> Board:
    """Every model, defence, ratio, attack and setting under both threat models, then ``extra``."""
    random = np.random.default_rng(0)
    entries = [
        _cell(random, pictures, threat, model, (defence, ratio), attack, setting)
        for threat in THREATS
        for model in models
        for defence, ratios in RATIOS.items()
        for ratio in ratios
        for attack in ATTACKS
        for setting in SETTINGS[defence]
    ]
    entries += extra
    return Board(
        name="sample",
        title="Sample leaderboard",
        question="What do uploads give away, and does a masked jigsaw puzzle change that?",
        metrics=METRICS,
        entries=tuple(entries),
        standings=tuple(_standings(entries)),
        reported=REPORTED,
        notes=("All numbers of this board are made up.", "Rows marked bound are not ranked."),
        about={"command": "fedmjp campaign run sample.yaml", "config": {"seed": 0}},
    )


def _cell(
    random: np.random.Generator,
    pictures: int,
    threat: ThreatModel,
    model: str,
    defended: tuple[str, float],
    attack: str,
    setting: Setting,
) -> BoardEntry:
    defence, ratio = defended
    shift = 0 if attack == "grey" else DEFENCES[defence] - 6 * ratio + 1.5 * (model == "deit_tiny")
    level = ATTACKS[attack] + shift
    refused = attack == "gradient_matching" and threat.update == "delta"
    verdict, reason = _judged(ROLES.get(attack, "attack"), defence, setting, level, refused)
    top1 = MODELS.get(model)
    undefended = f"{threat.update}-{model}-none-0"
    return sample_entry(
        id=f"{threat.update}-{model}-{defence}-{ratio:g}-{attack}-{setting}",
        floor=None if attack == "grey" else f"{threat.update}-{model}-{defence}-{ratio:g}-grey-{setting}",
        twin=None if attack == "grey" or defence == "none" else f"{undefended}-{attack}-a",
        model=model,
        weights="untrained" if top1 is None else "ab12cd34" * 8,
        defences=configured(defence, ratio, setting),
        attack=attack,
        role=ROLES.get(attack, "attack"),
        setting=setting,
        threat=threat,
        verdict=verdict,
        reason=reason,
        values=np.array([]) if refused else random.normal(level, 0.2 if attack == "grey" else 2.5, pictures),
        over_twin=None if defence == "none" or refused else _difference(DEFENCES[defence], pictures),
        utility=None if top1 is None else Utility(top1=top1 - 2 * (defence == "mjp"), source="model card"),
        cost=Cost(
            attack_seconds=None if refused else 0.012 * 40 ** (attack == "gradient_matching"), upload_bytes=22_878_656
        ),
    )


def configured(defence: str, ratio: float, setting: Setting) -> object:
    """What a plan makes of a defence in a setting: in a, nothing is shuffled."""
    if defence == "none":
        return ()
    return {"name": defence, "mask_ratio": ratio, **({"shuffle": False} if setting is Setting.A else {})}


def _judged(role: str, defence: str, setting: Setting, level: float, refused: bool) -> tuple[str, str]:
    if refused:
        return "refused", "needs a gradient, and the update is a weight delta"
    if role != "attack":
        return role, "a reference, not ranked"
    if defence != "none" and setting is Setting.C:
        return "inconclusive", "the undefended twin does not leak"
    if level < 11:
        return ("no leak seen" if defence == "none" else "withstood"), "no more than a guess"
    return ("reduced" if defence == "mjp" else "leaks"), "recovered more than a guess"


def sample_entry(*, values: np.ndarray, defences: object, threat: ThreatModel, **given: Any) -> BoardEntry:
    """An entry from its leakage per picture; other metrics follow from it, and what is told of its defences."""
    n = len(values)
    pipeline = pipeline_of(_DEFENCES.validate_python(defences))
    seen = pipeline.of_stage("examples", "update", "aggregate").configs
    metrics = {} if n == 0 else {name: _statistics(convert(values), name) for name, convert in _CONVERT.items()}
    exposed = int((values >= 20).sum())
    exact = int((values >= 40).sum())
    defaults: dict[str, Any] = {
        "defences": pipeline.configs,
        "defence": pipeline.label,
        "mask_ratio": pipeline.mask_ratio,
        "threat": threat.model_copy(update={"defences": seen}),
        "adapted": False,
        "protocol": "float",
        "n": n,
        "trials": 2 * n,
        "failures": 0,
        "missing": 0,
        "left_out": 0,
        "metrics": metrics,
        "scores": {
            name: {f"picture_{index:04d}": float(value) for index, value in enumerate(convert(values))}
            for name, convert in _CONVERT.items()
            if n
        },
        "flat": {},
        "exact": _share(exact, n) if n else None,
        "recognisable": _share(exposed, n) if n else None,
        "exposed": exposed,
        "realised_ratio": pipeline.mask_ratio,
        "over_floor": _difference(float(values.mean()) - ATTACKS["grey"], n) if n else None,
        "over_twin": None,
        "floor": None,
        "twin": None,
        "utility": None,
        "cost": Cost(attack_seconds=None, upload_bytes=None),
        "provenance": PROVENANCE,
    }
    return BoardEntry(**defaults | given)


def nasty_entry() -> BoardEntry:
    """An entry whose names come from somebody who means ill, and whose numbers are far apart."""
    return sample_entry(
        id="nasty '\"><script>",
        model=NASTY,
        weights="untrained",
        defences="none",
        attack=NASTY,
        role="attack",
        setting=Setting.A,
        threat=THREATS[0],
        verdict="leaks",
        reason=NASTY,
        values=np.array([120.0, 130.0, 95.0]),
    )


_CONVERT = {
    "psnr": lambda values: values,
    "mse": lambda values: 10 ** (-values / 10),
    "ssim": lambda values: np.clip(values / 40, 0, 1),
    "fft2d": lambda values: 10 ** (-values / 20),
}


def _statistics(values: np.ndarray, name: str) -> Statistics:
    """With a normal interval: near enough to look at."""
    half = 1.96 * float(values.std()) / len(values) ** 0.5
    mean = float(values.mean())
    low = name in ("mse", "fft2d")
    return Statistics(
        mean=mean,
        low=mean - half if len(values) > 1 else None,
        high=mean + half if len(values) > 1 else None,
        median=float(np.median(values)),
        p95=float(np.quantile(values, 0.05 if low else 0.95)),
        worst=float(values.min() if low else values.max()),
    )


def _share(count: int, n: int) -> Share:
    return Share(share=count / n, low=max(0.0, count / n - 0.15), high=min(1.0, count / n + 0.15))


def _difference(mean: float, n: int) -> Difference:
    return Difference(mean=mean, low=mean - 0.4, high=mean + 0.4, p_value=0.00003 if abs(mean) > 1 else 0.21, n=n)


def _standings(entries: Sequence[BoardEntry]) -> list[Standing]:
    """Per table and defended model the strongest attack, the least leaking first."""
    groups: dict[tuple[Any, ...], list[BoardEntry]] = {}
    for one in entries:
        if one.role == "attack":
            version = one.setting.compared_with
            key = (one.threat.update, version, one.setting, one.model, one.weights, one.defence, one.mask_ratio)
            groups.setdefault(key, []).append(one)
    best = {key: max(group, key=headline) for key, group in groups.items()}
    ranks: dict[tuple[Any, ...], int] = {}
    found: list[Standing] = []
    for key in sorted(groups, key=lambda key: (key[0] == "delta", key[1], headline(best[key]))):
        ranked = best[key].verdict not in ("inconclusive", "incomplete", "refused")
        ranks[key[:2]] = ranks.get(key[:2], 0) + ranked
        found.append(
            Standing(
                rank=ranks[key[:2]] if ranked else None,
                strongest=best[key].attack,
                entry=best[key].id,
                attacks=sum(bool(one.metrics) for one in groups[key]),
                adapted=False,
                **{name: getattr(best[key], name) for name in _SHARED},
            )
        )
    return found


_SHARED = (
    "origin", "threat", "setting", "protocol", "model", "weights", "defences", "defence", "mask_ratio", "verdict",
    "reason",
)  # fmt: skip
_DEFENCES: TypeAdapter[Any] = TypeAdapter(Defences)
