"""Cells of a campaign's board as a file that its author submits to another board."""

from collections.abc import Sequence

from fedmjp.attacks import ATTACKS
from fedmjp.benchmarks.leaderboard.entries import BoardEntry, Submitter
from fedmjp.benchmarks.leaderboard.submissions import EntryRecipe, PlugIn, Submission, unfit_names
from fedmjp.benchmarks.plan.trial_plan import TrialPlan
from fedmjp.defences import DEFENCES
from fedmjp.errors import BadInputError


def pack_entries(plan: TrialPlan, entries: Sequence[BoardEntry], submitter: Submitter) -> Submission:
    """Pack every cell that was run, with the recipe from which a board can run it again.

    Args:
        plan: Of the campaign.
        entries: Of its board.
        submitter: Who answers for them.

    Raises:
        BadInputError: If no campaign's file states the trials, none was run, or a board would refuse a name.
        UnknownNameError: If an attack or a defence is not installed.
    """
    if "grids" not in plan.about["config"]:
        raise BadInputError("only a campaign can be run again by others: state what was run in a file of a campaign")
    cells = [entry for entry in entries if entry.origin == "reproduced" and entry.verdict != "refused" and entry.n]
    if not cells:
        raise BadInputError("no cell has a score yet: run the campaign first")
    attacks = dict.fromkeys(entry.attack.partition(" ")[0] for entry in cells)
    defences = dict.fromkeys(config.name for entry in cells for config in entry.defences)
    stated = [
        *(PlugIn.of("attack", name, ATTACKS) for name in attacks),
        *(PlugIn.of("defence", name, DEFENCES) for name in defences),
    ]
    recipe = EntryRecipe(
        config=plan.about["config"],
        pictures=dict(zip(plan.trials["picture"], plan.trials["picture_sha256"], strict=True)),
        plug_ins=tuple(plug_in for plug_in in stated if plug_in),
    )
    submission = Submission(submitter=submitter, recipe=recipe, entries=tuple(cells))
    for fault in unfit_names(submission.model_dump(mode="json")):
        raise BadInputError(fault)
    return submission
