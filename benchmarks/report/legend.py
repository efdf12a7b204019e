"""What columns, metrics and verdicts are called, and what they mean."""

from collections.abc import Sequence

from fedmjp.benchmarks.leaderboard.entries import FLAT, LEAKAGE, Board, Verdict
from fedmjp.benchmarks.leaderboard.headline import crops_title
from fedmjp.benchmarks.leaderboard.measures import EXACT_FEATURE
from fedmjp.defences.pipeline import NONE
from fedmjp.metrics import EXACT, METRICS
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel

HEADINGS = {"psnr": "PSNR", "mse": "MSE", "ssim": "SSIM", "fft2d": "FFT2D", "lpips_alex": "LPIPS"}
EXACT_HEADING = "recovered exactly"
MEDIAN_HEADING = "median, dB"
LEAKAGE_HEADING = "mean, PSNR dB"
AGAINST_HEADING = "against no defence, dB"
ADDED_HEADING = "each defence adds, dB"
EXACT_SHARE = "recovered exactly, % (95 % interval)"
MEAN_HEADING = "mean, dB (95 % interval)"
# Of attacks that reveal features and labels.
DISCLOSED = "What else leaks: features and labels"
EXACT_FEATURES, FEATURE_ERROR = "features exact", "feature error, median"
AGAINST_CHANCE, AGAINST_NONE = "over chance, points", "against no defence, points"
SHARES = {  # metric by heading
    "labels right": "label_accuracy",
    "rank 1": "rank1",
    "rank 5": "rank5",
    "rank 1, other crop": "rank1_crop",
    "rank 5, other crop": "rank5_crop",
    "members known": "membership",
}
COMPARED = {
    Picture.CLEAN: "compared with the picture (settings a and c)",
    Picture.SHUFFLED: "compared with the shuffled picture (setting b)",
}

VERDICTS: dict[Verdict, str] = {
    "leaks": "recovered more than a guess; if defended, no less than without the defence",
    "reduced": "defended: recovered more than a guess, but less than without the defence",
    "withstood": "defended: an attack that knows the defence recovered no more than a guess, though it does without it",
    "naive attack failed": "the same of an attack that does not know the defence: no evidence of protection",
    "inconclusive": "nothing follows: the undefended twin is missing or does not leak, or pictures are too few or flat",
    "no leak seen": "undefended: this attack recovered no more than a guess",
    "incomplete": "trials are missing, or more than a twentieth failed for a reason that may pass",
    "refused": "the attack does not apply and was not run",
    "floor": "a reference that uses nothing of the upload; not ranked",
    "bound": "was given more than any server sees; not ranked",
}


def explain_verdicts(board: Board) -> dict[str, str]:
    """Explain the verdicts of a board.

    Args:
        board: The board.
    """
    present = {entry.verdict for entry in board.entries}
    return {name: meaning for name, meaning in VERDICTS.items() if name in present}


def explain_columns(board: Board) -> dict[str, str]:
    """Explain the columns that do not speak for themselves.

    Args:
        board: The board.
    """
    return {
        "setting": "a: the gradient of the picture is attacked, the reconstruction compared with the picture; b: the "
        "gradient of the shuffled picture, compared with the shuffled picture; c: the gradient of the shuffled "
        "picture, compared with the picture",
        "rank": "1 leaks least, among all that one server would see of clients without defences and that is compared "
        "with the same version of the picture: settings a and c together, b apart",
        "defence": "what clients do, in that order; options only where they differ from the default. One that shuffles "
        "does so in b and c; in a it does the rest of what it does",
        **(_columns_of_pictures(board) if board.revealing("pictures").entries else {}),
        "weights": "untrained, or the checkpoint by the first letters of its SHA-256",
        "protocol": "whether pictures were scored as floats, or rounded to 8 bits as in a PNG file",
        "n": "pictures that count, and of how many uploads where some came together, which are not independent",
        "attack s": "seconds per picture, on the hardware of the provenance",
        "upload": "size of one whole update in float32",
    }


def _columns_of_pictures(board: Board) -> dict[str, str]:
    return {
        EXACT_HEADING: f"pictures with {EXACT:g} dB or more against the picture that is compared with; 95 % interval "
        "of their share (Wilson's for as many trials as uploads, as if pictures of one were alike). Rows are ordered "
        "by it, then by the median",
        MEDIAN_HEADING: "leakage (PSNR) of the picture in the middle; higher reveals more",
        LEAKAGE_HEADING: "mean leakage over pictures and its 95 % interval, which resamples uploads; a few high values "
        "move it",
        "flat": f"pictures of nearly one colour, which alone scores {FLAT:g} dB or more; they count in no other figure "
        "and decide no verdict",
        AGAINST_HEADING: "leakage minus that of the undefended twin in setting a, per picture: mean, interval, p of "
        "Wilcoxon's test, with a value per upload",
        ADDED_HEADING: "where there are several defences: leakage minus that of the same without this one, per "
        "picture; less than 0 is what it protects beyond the others",
        "over grey, dB": "the same against a grey picture, which uses nothing of the upload",
        "p95, worst": "leakage of the picture at 95 %, and of the most revealing trial",
        "recognisable": f"share of pictures with {board.recognisable_at:g} dB or more, which count as recognisable; "
        "95 % interval",
    }


def explain_disclosed() -> dict[str, str]:
    """Explain the columns of the table of attacks that reveal features and labels, by heading."""
    return {
        EXACT_FEATURES: f"features with an error of {EXACT_FEATURE:g} or less; 95 % interval of their share (Wilson's "
        "for as many trials as uploads). A feature is what the last layer reads of a picture. Rows are ordered by it, "
        "then by rank 1, or labels right",
        "labels right": "share of pictures whose label is told, each label told counting once",
        FEATURE_ERROR: "distance from the feature of what went into the network, over that from the mean of the batch; "
        "the mean itself scores 1",
        "rank 1, rank 5": "share of pictures that are found by their feature among the 1 or 5 nearest of all pictures "
        "that were attacked; in setting b, of the shuffled ones",
        "other crop": "the same where only another crop of each picture is at hand",
        "members known": "share of pictures that are told from those outside of the upload, of which 0.001 at most are "
        "taken for members; with fewer than 1,000 of these, none",
        AGAINST_CHANCE: "labels right, or rank 1, minus that of a guess without the upload, in percentage points: "
        "mean, interval, p of Wilcoxon's test, with a value per upload",
    }


def update_title(threat: ThreatModel) -> str:
    """Name what a client sends: ``gradient``, or ``weight delta after 5 steps``.

    Args:
        threat: What reaches the server.
    """
    if threat.update == "gradient":
        return "gradient"
    return f"weight delta after {threat.local_steps} {'step' if threat.local_steps == 1 else 'steps'}"


def threat_title(threat: ThreatModel) -> str:
    """Name what a server sees of undefended clients, as a heading: ``gradient of 1 picture, labels not told``.

    Args:
        threat: What reaches the server.
    """
    parts = {
        f"label smoothing {threat.label_smoothing:g}": threat.label_smoothing,
        f"mixup {threat.mixup:g}": threat.mixup,
        crops_title(threat): threat.crop_scale,
        f"{threat.uploads_per_picture} uploads per picture": threat.uploads_per_picture > 1,
        f"labels {'told' if threat.labels_known else 'not told'}": True,
        f"server changes weights ({threat.server and threat.server.text})": threat.server,
    }
    pictures = "1 picture" if threat.batch_size == 1 else f"{threat.batch_size} pictures"
    details = ", ".join(part for part, applies in parts.items() if applies)
    return f"{update_title(threat)} of {pictures}, {details}"


def name_defence(label: str, mask_ratio: float) -> str:
    """Name what clients do: ``no defence``, ``mjp, mask ratio 0.27``.

    Args:
        label: Label of the pipeline of defences.
        mask_ratio: Share of patches that it shuffles or masks, from 0 to 1.
    """
    if label == NONE:
        return "no defence"
    return label + (f", mask ratio {mask_ratio:g}" if mask_ratio else "")


def write_heading(name: str) -> str:
    """Write a metric as a heading, with its unit.

    Args:
        name: The metric.
    """
    title = HEADINGS.get(name, name)
    return f"{title} dB" if name == LEAKAGE else title


def define_metrics(names: Sequence[str]) -> dict[str, str]:
    """Define each metric exactly, by its heading.

    Args:
        names: Metrics; unknown ones are skipped.
    """
    return {
        write_heading(name): f"{METRICS[name].definition}; {METRICS[name].bounds}" for name in names if name in METRICS
    }
