"""Several uploads of a picture, from the configuration to the attack."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedmjp.attacks.patch_embedding import PatchEmbeddingAttack
from fedmjp.attacks.testing import CHECKS, AttackTrial
from fedmjp.benchmarks.campaign.spec import Campaign
from fedmjp.benchmarks.federation.simulation import RunFolder
from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.plan.experiment import Experiment
from fedmjp.benchmarks.plan.planning import plan
from fedmjp.benchmarks.running.engine import UploadJob, jobs
from fedmjp.benchmarks.running.runner import Foreman, run_local
from fedmjp.benchmarks.running.workbench import Setup
from fedmjp.benchmarks.uploads import direct as direct_uploads
from fedmjp.benchmarks.uploads.direct import DirectUploads, Memory
from fedmjp.benchmarks.uploads.source import RecordedUploads, played
from fedmjp.cli import main
from fedmjp.data.selection import Selection, select_for
from fedmjp.errors import AttackNotApplicableError, RecordError
from fedmjp.exchange import Exchange
from fedmjp.models import names
from fedmjp.records import Upload, weights_digest
from fedmjp.scenario import Scenario
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel
from tests.boards import attack_board
from tests.conftest import batch_of, small_model, small_scenario, upload_of
from tests.experiments import Told
from tests.several_uploads import Witness, record, reply, witness, write_manifest

__all__ = ["witness"]
DEGRADED = ("prune:kept=0.5", "gaussian:noise=0.01", "round")


def repeated(uploads: int, degraded: Sequence[str] = (), *, mask_ratio: float = 0.3, **values: Any) -> Scenario:
    """MJP, and what is done to updates besides."""
    defences = (f"mjp:mask_ratio={mask_ratio}", *degraded)
    shared = {"clients": 2, "pictures_per_client": 2, "uploads_per_picture": uploads}
    return small_scenario(defences=defences, **{**shared, **values})


def experiment(uploads: int, degraded: Sequence[str] = (), *, attack: str = "witness", **values: Any) -> Experiment:
    scenario = repeated(uploads, degraded, **values)
    return Experiment.parse({"scenario": scenario, "attacks": (attack,), "settings": ("b", "c"), "metrics": ("psnr",)})


def computed(tried: Experiment, memory: Memory | None = None) -> list[Exchange]:
    selection = select_for(tried.scenario)
    source = DirectUploads(tried, selection, memory)
    batches = [tuple(entry.name for entry in batch) for batch in selection.batches(tried.scenario)]
    found = source.uploads(batches)
    assert all(isinstance(each, Exchange) for each in found.values()), found
    return [each for each in found.values() if isinstance(each, Exchange)]


def given(recorded: Exchange) -> list[str]:
    return [weights_digest(each.tensors) for each in (recorded.upload, *recorded.upload.others)]


@pytest.fixture(scope="module")
def uploads(pictures: Selection) -> tuple[Upload, Upload]:
    """Two of a client, with everything in them."""
    model = small_model(defence="mjp")
    first, second = (upload_of(model, batch_of(pictures, Picture.SHUFFLED, index)) for index in range(2))
    return first, second


def seen(attack: Witness, upload: Upload) -> dict[str, float]:
    made = attack.run([upload], small_model(defence="mjp"), ThreatModel(), generator=torch.Generator().manual_seed(0))
    return dict(made[0].diagnostics)


def test_an_attack_gets_others_if_it_reads_them_and_a_generator_of_all(uploads: tuple[Upload, Upload]) -> None:
    class Alone(Witness):
        reads_others = False

    first, second = uploads
    both = replace(first, others=(second,))
    assert seen(Witness(), both)["uploads"] == 2
    assert seen(Witness(), both)["seed"] != seen(Witness(), first)["seed"]
    assert seen(Alone(), both) == seen(Witness(), first), "others are not there for it"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_conformance_suite_gives_others_and_degraded_uploads(check: Callable[[AttackTrial], None]) -> None:
    threat = ThreatModel.parse({"uploads_per_picture": 2, "defences": DEGRADED})
    trial = AttackTrial(attack=Witness(), model="deit_tiny", threat=threat, gain=None)
    model, uploads = trial.control("mjp")
    made = trial.run(uploads, model)
    assert [each.diagnostics["uploads"] for each in made] == [2, 2]
    check(trial)


def test_attacks_on_single_uploads_do_not_change_by_others(uploads: tuple[Upload, Upload]) -> None:
    first, second = uploads
    made = [
        PatchEmbeddingAttack().run(
            [each], small_model(defence="mjp"), ThreatModel(), generator=torch.Generator().manual_seed(0)
        )[0]
        for each in (first, replace(first, others=(second, replace(second, kind="delta"))))
    ]
    assert torch.equal(made[0].images, made[1].images)


def test_others_that_cannot_be_read_are_refused(uploads: tuple[Upload, Upload]) -> None:
    first, second = uploads
    with pytest.raises(AttackNotApplicableError, match="the upload is a delta"):
        seen(Witness(), replace(first, others=(replace(second, kind="delta"),)))
    cut = {names.POSITION_EMBEDDING: second.tensors[names.POSITION_EMBEDDING][:, :3]}
    with pytest.raises(AttackNotApplicableError, match="has shape"):
        seen(Witness(), replace(first, others=(replace(second, tensors=cut),)))
    with pytest.raises(RecordError, match="others have others"):
        replace(first, others=(replace(second, others=(first,)),))


def test_uploads_do_not_depend_on_how_many_are_asked_for(witness: str) -> None:
    five = computed(experiment(5))
    assert len(set(given(five[0]))) == 5
    for count in (1, 2, 4):
        for few, many in zip(computed(experiment(count)), five, strict=True):
            assert given(few) == given(many)[:count]
            assert torch.equal(few.private.mask, many.private.mask), "the first upload is scored against"
    masks = [(each.tensors[names.POSITION_EMBEDDING][0, 1:] == 0).all(1) for each in five[0].upload.others]
    assert all(0 < int(mask.sum()) < 40 for mask in masks)
    assert len({tuple(mask.tolist()) for mask in masks}) == 4


def test_others_are_computed_for_attacks_that_read_them_and_told_labels_alike(witness: str) -> None:
    assert computed(experiment(3, attack="patch_embedding"))[0].upload.others == ()
    told = computed(experiment(2, labels_known=True))[0]
    assert told.upload.others[0].labels == tuple(told.private.labels.tolist())
    assert computed(experiment(2))[0].upload.others[0].labels is None


def test_a_campaign_computes_every_upload_once(witness: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = (1, 3, 2)
    experiments = tuple(experiment(count, clients=1, pictures_per_client=4, mask_ratio=ratio)
                        for count in counts for ratio in (0.3, 0.5))  # fmt: skip
    selection = select_for(experiments[0].scenario)
    planned = plan(experiments, [selection.batches(each.scenario) for each in experiments], uploads="direct")
    output = OutputFolder(tmp_path)
    output.prepare(fresh=False)
    setup = Setup(output, experiments, selection, keep="none", threads=1)
    passes: list[int] = []
    gradients = direct_uploads.entrance_gradients

    def counted(model: Any, batches: Any, tensors: Any, **options: Any) -> Any:
        passes.append(len(batches))
        return gradients(model, batches, tensors, **options)

    monkeypatch.setattr(direct_uploads, "entrance_gradients", counted)
    store = setup.store()
    assert [job.uploads for job in jobs(planned)] == [0, 0, 0, 1, 1, 1]
    assert run_local(planned, setup, workers=1, progress=Told()) == 0
    assert passes == [4] * 3 * 2, "three uploads at two mask ratios, whatever the number of experiments"
    rows = {row.key: row for row in store.trials([trial.key for trial in planned.tasks])}
    assert {row.status for row in rows.values()} == {"ok"}
    found = set()
    for trial in planned.tasks:
        told = rows[trial.key].diagnostics
        found.add((trial.cell.threat.uploads_per_picture, told["uploads"], told["masks"]))
    assert found == {(count, count, count) for count in counts}


def test_a_worker_goes_on_with_the_uploads_that_it_has_computed() -> None:
    waiting = deque(UploadJob(part, (), uploads) for uploads in range(3) for part in range(3))
    foreman: Any = Foreman.__new__(Foreman)
    foreman._computed = {}
    order = [(slot, foreman._next(slot, waiting)) for slot in (0, 1, 0, 1, 0, 0, 1, 0, 1)]
    assert [(slot, job.uploads) for slot, job in order] == [
        (0, 0), (1, 1), (0, 0), (1, 1), (0, 0), (0, 2), (1, 1), (0, 2), (1, 2),
    ]  # fmt: skip
    assert not waiting


@pytest.mark.parametrize("degraded", [(), DEGRADED], ids=["clean", "degraded"])
def test_the_client_app_sends_what_direct_mode_computes(witness: str, degraded: tuple[str, ...]) -> None:
    tried = experiment(2, degraded)
    made = computed(tried)[0].upload
    for upload in (made, *made.others):
        sent = reply(tried.scenario, upload.node, upload.server_round)[names.POSITION_EMBEDDING]
        ours = upload.tensors[names.POSITION_EMBEDDING]
        assert (sent - ours).norm() <= 1e-3 * ours.norm()
        assert degraded or torch.equal(sent == 0, ours == 0)


def test_recorded_uploads_of_a_picture_come_together(witness: str, tmp_path: Path) -> None:
    tried = experiment(3)
    folder = RunFolder(tmp_path)
    record(tried.scenario, folder)
    expected = {each.private.pictures: each for each in computed(tried)}
    found = RecordedUploads(tried, folder).uploads(list(expected))
    for pictures, each in found.items():
        assert isinstance(each, Exchange)
        direct = expected[pictures]
        assert torch.equal(each.private.mask, direct.private.mask)
        rounds = [upload.server_round for upload in (each.upload, *each.upload.others)]
        assert rounds == [upload.server_round for upload in (direct.upload, *direct.upload.others)]
        for ours, theirs in zip(direct.upload.others, each.upload.others, strict=True):
            assert theirs.labels is None
            difference, size = (
                ours.tensors[names.POSITION_EMBEDDING] - sign * theirs.tensors[names.POSITION_EMBEDDING]
                for sign in (1, 0)
            )
            assert difference.norm() <= 1e-4 * size.norm()


def test_a_run_that_shows_pictures_more_often_serves_those_that_do_so_less(witness: str, tmp_path: Path) -> None:
    once, thrice = (experiment(uploads) for uploads in (1, 3))
    assert played([once.scenario, thrice.scenario, once.scenario]) == [thrice.scenario]
    folder = RunFolder(tmp_path)
    record(thrice.scenario, folder)
    for tried, count in ((once, 1), (thrice, 3)):
        for direct in computed(tried):
            found = RecordedUploads(tried, folder).uploads([direct.private.pictures])[direct.private.pictures]
            assert isinstance(found, Exchange)
            uploads = (found.upload, *found.upload.others)
            assert len(uploads) == count
            assert torch.equal(found.private.mask, direct.private.mask)
            for ours, theirs in zip(uploads, (direct.upload, *direct.upload.others), strict=True):
                difference, size = (
                    ours.tensors[names.POSITION_EMBEDDING] - sign * theirs.tensors[names.POSITION_EMBEDDING]
                    for sign in (1, 0)
                )
                assert difference.norm() <= 1e-4 * size.norm()


def test_a_client_that_would_upload_the_same_again_is_played_once_and_serves_what_direct_mode_computes(
    witness: str, tmp_path: Path
) -> None:
    undefended = small_scenario(clients=2, pictures_per_client=2, uploads_per_picture=3)
    moving = undefended.model_copy(update={"server_learning_rate": 0.1})
    assert played([moving]) == [moving], "each upload is of other weights"
    for drawn in ({"crop_scale": 0.5}, {"mixup": 0.8, "batch_size": 2}):
        anew = small_scenario(clients=2, pictures_per_client=2, uploads_per_picture=3, **drawn)
        assert played([anew]) == [anew], "each upload is of another crop, or mixture"
    (once,) = played([undefended])
    assert once.rounds == 2
    folder = RunFolder(tmp_path)
    record(once, folder)
    tried = Experiment.parse({"scenario": undefended, "attacks": (witness,), "settings": ("a",), "metrics": ("psnr",)})
    for direct in computed(tried):
        served = RecordedUploads(tried, folder).uploads([direct.private.pictures])[direct.private.pictures]
        assert isinstance(served, Exchange)
        pairs = zip((served.upload, *served.upload.others), (direct.upload, *direct.upload.others), strict=True)
        for ours, theirs in pairs:
            assert (ours.server_round, ours.node, ours.weights) == (theirs.server_round, theirs.node, theirs.weights)
            expected = theirs.tensors[names.POSITION_EMBEDDING]
            assert (ours.tensors[names.POSITION_EMBEDDING] - expected).norm() <= 1e-4 * expected.norm()


def test_a_recording_of_several_uploads_is_attacked(
    witness: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = repeated(2, DEGRADED)
    record(scenario, RunFolder(tmp_path / "run"))
    write_manifest(scenario, tmp_path / "run", {entry.name: entry.sha256 for entry in select_for(scenario).entries})
    arguments = ["--attack", "witness", "--setting", "b", "--uploads", str(tmp_path / "run"), "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["fedmjp", "attack", *arguments, "--output", str(tmp_path / "attack")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    board = attack_board(tmp_path / "attack").set_index("attack")
    assert board.loc["witness", "threat_uploads_per_picture"] == 2
    assert board.loc["witness", "defence"] == "mjp + prune:kept=0.5 + gaussian + round"


def test_a_campaign_lists_numbers_of_uploads() -> None:
    threat = {"uploads_per_picture": [1, 4]}
    grid = {"models": ["deit_tiny"], "attacks": ["grey"], "defences": [["mjp", "round"]], "settings": ["b"]}
    campaign = Campaign.parse({"name": "x", "grids": [{**grid, "threats": [threat, {}]}]})
    threats = [each.scenario.threat for each in campaign.experiments(device="cpu")]
    assert {each.uploads_per_picture for each in threats} == {1, 4}
    assert {each.pipeline.label for each in threats} == {"round"}
