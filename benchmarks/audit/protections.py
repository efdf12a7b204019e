"""Protections that an app has: what each one states, and what was measured of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedmjp.benchmarks.audit.noise import Change, Repeats, measure_change, measure_repeats
from fedmjp.benchmarks.audit.running import Records, lines
from fedmjp.benchmarks.audit.sums import UNEVEN, Sum, fit_sum, read_round, spread_of_masks, strongest_correlation
from fedmjp.benchmarks.audit.wire import Answer
from fedmjp.defences.accounting import composed_epsilon
from fedmjp.defences.local_dp import LocalDp

DELTA = 1e-5
ROUNDS = (1, 10, 100)
TOLERANCE = 0.15  # by which measured noise may differ from what is stated
POISSON = "UniformWithReplacementSampler"  # Opacus' name for it
EACH_ONCE = ("RandomSampler", "SequentialSampler")  # of torch: each example is in one batch of a pass
SECURE_SUM = "secure sum"
PARALLEL = 0.9  # correlation from which on a masked message holds what it should hide

Verified = Literal["yes", "no", "not measured"]


@dataclass(frozen=True)
class Protection:
    """One protection, or that there is none."""

    protection: str
    verified: Verified | None  # None where none was seen
    said: str
    drowns: bool = False  # whether noise was measured that hides what one example did
    adds_noise: bool = False


def read_mods(records: Records) -> list[dict[str, Any]]:
    """List the mods of the app's clients, each once, with the defences of ours that it applies to every update.

    Args:
        records: Folders of the watched run.
    """
    noted = [json.dumps(line, sort_keys=True) for line in lines(records.evaluator / "mods.jsonl")]
    return [json.loads(line) for line in dict.fromkeys(noted)]


def verify(records: Records, recipe: Mapping[str, Any], answers: Sequence[Answer]) -> list[Protection]:
    """List the protections that were found, each with what it was measured on.

    Args:
        records: Folders of the watched run.
        recipe: That was seen.
        answers: Of which arrays were kept.
    """
    return [*_of_noise(records, recipe, answers), *_of_sums(records, answers), *_of_statements(records)]


def _of_noise(records: Records, recipe: Mapping[str, Any], answers: Sequence[Answer]) -> list[Protection]:
    stated = [_opacus(recipe["opacus"])] if recipe.get("opacus") else []
    readable = [answer for answer in answers if answer.kind in ("weights", "gradient")]
    mods = read_mods(records)
    if not readable:
        return stated + [_mod(defence, None, None) for mod in mods for defence in mod["defences"]]
    changes = (measure_change(answer, records.evaluator) for answer in readable if answer.kind == "weights")
    change = next((candidate for candidate in changes if candidate is not None), None)
    repeats = measure_repeats(records, readable)
    stated += [_mod(defence, change, repeats) for mod in mods for defence in mod["defences"]]
    noise = _noise(change, repeats, is_bounded=any(protection.protection == LocalDp.name for protection in stated))
    is_noisy = (change is not None and change.is_noisy) or (
        repeats is not None and repeats.is_alike and repeats.is_noisy
    )
    return [*stated, replace(noise, drowns=repeats is not None and repeats.drowns, adds_noise=is_noisy)]


def _mod(defence: Mapping[str, Any], change: Change | None, repeats: Repeats | None) -> Protection:
    """Hold what a defence of ours among the app's mods states against the noise that was measured.

    Args:
        defence: Its name and options, as the app has them.
        change: What was done to an update after training.
        repeats: Two answers to one message.
    """
    name, options = str(defence["name"]), {key: value for key, value in defence.items() if key != "name"}
    if name != LocalDp.name:
        return Protection(name, "not measured", f"A mod of the app, with {options}. It states no epsilon.")
    mod = LocalDp(options)
    spent = ", ".join(f"{mod.spent(rounds).epsilon:.3g} after {rounds}" for rounds in ROUNDS)
    sentence = (
        f"A mod of the app: it clips the whole update to {mod.options.clipping_norm:g} and adds noise of standard "
        f"deviation {mod.deviation:.3g}. Epsilon for all of a client's data (replaced) at delta {mod.options.delta:g}, "
        f"composed over rounds: {spent}."
    )
    repeated = repeats.deviation if repeats is not None and repeats.is_alike and repeats.is_noisy else None
    measured = change.deviation if change is not None and change.is_noisy else repeated
    if measured is None:
        return Protection(name, "not measured", f"{sentence} No noise was measured: no update was seen before it.")
    sentence += f" Measured: {measured:.3g}."
    if abs(measured / mod.deviation - 1) > TOLERANCE:
        return Protection(name, "no", sentence)
    return Protection(name, "yes", sentence, drowns=change is not None and change.drowns)


def _noise(change: Change | None, repeats: Repeats | None, *, is_bounded: bool) -> Protection:
    """Describe clipping and noise from the last step to the wire."""
    name = "clipping or noise"
    repeated = _repeated(repeats)
    drawn = repeats is not None and repeats.is_alike and repeats.is_noisy
    if change is None:
        return Protection(name, "yes" if drawn else "not measured", repeated)
    if not change.is_noisy and not change.is_scaled:
        sentence = f"After training nothing is done: what leaves is what was trained, to the last digits. {repeated}"
        return Protection(name, "yes" if drawn else None, sentence)
    scaled = f"The update was scaled by {change.factor:.3g} before it left"
    if not change.is_noisy:
        return Protection(name, "yes", f"{scaled}, as clipping does; no noise was added. {repeated}")
    sentence = (
        f"Something was added to each number before it left: standard deviation {change.deviation:.3g}, in all "
        f"{change.added / change.length:.2g} times as long as the update."
    )
    if change.is_scaled:
        sentence = f"{scaled}. {sentence}"
    if repeats is not None and repeats.is_alike and not repeats.is_noisy:
        return Protection(
            name, "no", f"{sentence} It is the same in every repeat: whoever holds the seed takes it off."
        )
    bound = "" if is_bounded else f" {_epsilon(change)}"
    return Protection(name, "yes", f"{sentence} {repeated}{bound}")


def _repeated(repeats: Repeats | None) -> str:
    if repeats is None:
        return "No client was asked twice for the same training: none answered with arrays within seconds."
    if not repeats.is_alike:
        return (
            "A client that was asked twice took other batches, or began from other weights, so noise was not "
            "measured from repeats."
        )
    if not repeats.is_noisy:
        return "A client that was asked twice, with the same weights and batches, answered the same: it draws no noise."
    return (
        "A client that was asked twice, with the same weights and batches, answered with noise of standard deviation "
        f"{repeats.deviation:.3g}, {repeats.share:.0%} of the length of what it says."
    )


def _epsilon(change: Change) -> str:
    """State what the noise is worth where clipping bounds what it hides: updates at most twice its norm apart."""
    if not change.is_scaled or change.factor > 1:
        return "No bound on the length of updates was seen, so no epsilon follows from the noise."
    norm = change.factor * change.length
    spent = _over_rounds(change.deviation / (2 * norm), 1, 1.0)
    return (
        f"If no update is ever longer than this one ({norm:.3g}), epsilon for all of a client's data (replaced), at "
        f"delta {DELTA:g} and composed over rounds, is {spent}."
    )


def _over_rounds(multiplier: float, releases: int, rate: float) -> str:
    spent = [f"{composed_epsilon(multiplier, DELTA, releases * rounds, rate):.3g}" for rounds in ROUNDS]
    return ", ".join(f"{epsilon} after {rounds}" for epsilon, rounds in zip(spent, ROUNDS, strict=True))


def _of_sums(records: Records, answers: Sequence[Answer]) -> list[Protection]:
    name = SECURE_SUM
    if not is_masked(records):
        if not any(answer.kind in ("weights", "gradient") for answer in answers):
            return []
        return [Protection(name, None, "The server gets each client's own update, and adds them up itself.")]
    round_seen = read_round(records)
    if round_seen is None:
        sentence = "Answers hold bytes and no weights, as of secure aggregation. What they hide was not tested"
        return [
            Protection(name, "not measured", f"{sentence}: no client was seen training, or there was no next round.")
        ]
    first_weights, trained, next_weights = round_seen
    correlation = strongest_correlation(records, first_weights, trained)
    if correlation >= PARALLEL:
        sentence = (
            "Not masked: an answer that looks so runs parallel to the client's own update or weights, correlation "
            f"{correlation:.4f}. The server reads it without any sum."
        )
        return [Protection(name, "no", sentence)]
    masked = (
        f"No answer runs parallel to the update or weights that it hides: correlation at most {correlation:.2g}, where "
        f"{PARALLEL:g} would give them away. {_judge_spread(spread_of_masks(records))}"
    ).rstrip()
    fitted = fit_sum(first_weights, trained, next_weights)
    verified, sentence = _judge_sum(fitted, len(trained))
    caveat = "How masks are drawn, and whether fewer clients, or some with the server, unmask one, was not tested."
    return [Protection(name, verified, f"{sentence} {masked} {caveat}")]


def _judge_spread(p_value: float | None) -> str:
    if p_value is None:
        return ""
    if p_value < UNEVEN:
        return "But its integers are not spread evenly over their modulus, as those of a mask that hides all are."
    return f"Its integers are spread evenly over their modulus (chi-square, p = {p_value:.2g}), as a mask's are."


def _judge_sum(fitted: Sum | None, clients: int) -> tuple[Verified, str]:
    if fitted is None:
        return "not measured", "The weights did not change over the round, so nobody can tell a sum from nothing."
    remainder = f"standard deviation {fitted.deviation:.2g} in each number, {fitted.residual:.0%} of the length"
    if not fitted.takes_part:
        return (
            "not measured",
            f"Whether the next weights are a sum is drowned in something else, as noise: {remainder}.",
        )
    part, share = len(fitted.takes_part), f"{min(fitted.takes_part):.3g} to {max(fitted.takes_part):.3g}"
    besides = f"Something else, as rounding or noise, is added: {remainder}."
    if part == 1:
        return "no", f"Not a sum: of clients' updates the next weights hold one alone, times {share}. {besides}"
    sentence = (
        f"The change of the next weights is a sum of the updates of {part} of {clients} clients, each times {share}."
    )
    return "yes", f"{sentence} {besides}"


def is_masked(records: Records) -> bool:
    """Tell whether answers hold lists of bytes, as those of secure aggregation do.

    Args:
        records: Folders of the watched run.
    """
    return any(
        isinstance(value, list) and value and isinstance(value[0], Mapping)
        for line in records.wire()
        if line["way"] == "up" and line["type"].startswith("train")
        for description in line.get("records", {}).values()
        if description["kind"] == "config"
        for value in description["values"].values()
    )


def _of_statements(records: Records) -> list[Protection]:
    stated = sorted({name for line in records.wire() for name in _metrics(line) if "epsilon" in name.lower()})
    if not stated:
        return []
    sentence = f"The app reports {', '.join(stated)} in clear, of one round; rounds add up."
    return [Protection("an epsilon that the app reports", "not measured", sentence)]


def _metrics(line: Mapping[str, Any]) -> list[str]:
    described = line.get("records", {}).values()
    return [name for description in described if description["kind"] == "metrics" for name in description["values"]]


def _opacus(optimisers: Sequence[Mapping[str, Any]]) -> Protection:
    """Hold what Opacus states against the noise that was added; epsilon is that of the client that pays most."""
    name = "Opacus (differential privacy of single examples)"
    weakest = min(optimisers, key=lambda stated: float(stated["noise_multiplier"]))
    multiplier, norm = float(weakest["noise_multiplier"]), float(weakest["max_grad_norm"])
    sentence = (
        f"It states clipping of each example's gradient to {norm:g} and a noise multiplier of {multiplier:g}, the "
        "least of all clients."
    )
    if any(stated["measured_noise"] is None for stated in optimisers):
        return Protection(name, "not measured", f"{sentence} How much noise was added could not be measured.")
    least = min(optimisers, key=lambda stated: float(stated["measured_noise"]) / _expected(stated))
    measured, expected = float(least["measured_noise"]), _expected(least)
    sentence += f" Noise of standard deviation {measured:.3g} was added to a sum, {expected:.3g} stated."
    if abs(measured - expected) > TOLERANCE * expected:
        return Protection(name, "no", sentence)
    if multiplier <= 0:
        return Protection(name, "yes", sentence)
    if reason := next(filter(None, map(_unverified_sampling, optimisers)), None):
        return Protection(name, "not measured", f"{sentence} Epsilon is not verified: {reason}.")
    costliest = max(optimisers, key=lambda stated: _spent(stated, 1))
    spent = ", ".join(f"{_spent(costliest, rounds):.3g} after {rounds}" for rounds in ROUNDS)
    neighbours = "added or removed" if _is_poisson(costliest) else "replaced by nothing, in the same batches"
    return Protection(
        name,
        "yes",
        f"{sentence} Epsilon for one example ({neighbours}) at delta {DELTA:g}, composed over rounds of "
        f"{_sampling_in_words(costliest)}, as seen here: {spent}.",
    )


def _expected(stated: Mapping[str, Any]) -> float:
    return float(stated["noise_multiplier"]) * float(stated["max_grad_norm"])


def _is_poisson(stated: Mapping[str, Any]) -> bool:
    return all(drawing["sampler"] == POISSON for drawing in stated["passes"])


def _unverified_sampling(stated: Mapping[str, Any]) -> str | None:
    """Explain why nobody can tell in how many steps an example takes part; None where that is known."""
    passes = stated["passes"]
    if not passes:
        return "its batches come from no loader of torch, so how they are drawn was not seen"
    if _is_poisson(stated):
        if len(passes) > 1:
            return "examples are drawn with several rates in one round"
        return "one drawn batch serves several steps" if stated["steps_on_batch"] > 1 else None
    unknown = [drawing["sampler"] for drawing in passes if drawing["sampler"] not in EACH_ONCE or drawing["replaces"]]
    return f"{unknown[0]} may draw an example more than once in a pass" if unknown else None


def _spent(stated: Mapping[str, Any], rounds: int) -> float:
    """Compute epsilon from the sampling that took place.

    Poisson sampling is accounted for by privacy loss distributions. In a pass that is shuffled, or in order, each
    example takes part in the steps of one batch: these releases compose without amplification, which is exact for
    batches in order and an upper bound for shuffled ones (Chua et al., ICML 2024).
    """
    multiplier = min(
        float(stated["noise_multiplier"]), float(stated["measured_noise"]) / float(stated["max_grad_norm"])
    )
    if _is_poisson(stated):
        return composed_epsilon(multiplier, DELTA, int(stated["steps"]) * rounds, float(stated["passes"][0]["rate"]))
    return composed_epsilon(multiplier, DELTA, _passes(stated) * int(stated["steps_on_batch"]) * rounds)


def _passes(stated: Mapping[str, Any]) -> int:
    return sum(int(drawing["passes"]) for drawing in stated["passes"])


def _sampling_in_words(stated: Mapping[str, Any]) -> str:
    passes = _passes(stated)
    over = f"{passes} {'pass' if passes == 1 else 'passes'} over the data"
    steps = f"{stated['steps']} steps in {over}"
    if _is_poisson(stated):
        return f"{steps}, each example drawn with probability {stated['passes'][0]['rate']:.3g} for each step (Poisson)"
    times = passes * int(stated["steps_on_batch"])
    return f"{steps}, each example in {times} of them: shuffling alone is not counted as protection"
