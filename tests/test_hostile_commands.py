"""Hostile command lines: each is told in one line with exit code 2; none hangs, traces back, begins or writes."""

import json
import shlex
import signal
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedmjp.cli import main

SECONDS = 20  # in which each must have ended
BEGINS = (
    "fedmjp.benchmarks.running.runner.run_experiment", "fedmjp.benchmarks.federation.simulation.run_app",
    "fedmjp.benchmarks.federation.training.run_app", "fedmjp.benchmarks.running.runner.run_campaign",
    "fedmjp.training.central.train", "fedmjp.evaluation.consistency.measure_consistency",
)  # fmt: skip
CAMPAIGN = """
name: x
data: {pictures: 1}
image_size: 32
patch_size: 8
grids:
  - {models: [deit_tiny], attacks: [grey], defences: [none], settings: [a]}
"""
# Names in braces are files and folders that the fixture makes.
LINES = r"""
atack
--atack
--help --atack
-x
""
🐱
quickstart extra
quickstart --device gpu
quickstart --device ""
quickstart --output ""
quickstart --fresh=yes
list
list atacks
list ""
list attacks --jsno
doctor extra
weights fetch
weights fetch nothing
weights fetch timm:nothing
weights fetch ""
weights fetch ../../etc/passwd
weights verify
weights verify {missing} --model deit_tiny
weights verify {folder} --model deit_tiny
weights verify {file} --model nothing
weights verify {file} --model deit_tiny --image-size 0
weights verify {file} --model deit_tiny --image-size 100000000
weights verify {file} --model deit_tiny --patch-size 0
weights verify {file} --model deit_tiny --patch-size -1
weights verify {file} --model deit_tiny --classes 1
weights verify {file} --model deit_tiny --classes 99999999999999999999
weights verify {file} --model deit_tiny --localisation cubic
weights verify {file} --model deit_tiny --localisation-layers 7
weights verify {file} --model deit_tiny --defence nothing
weights verify {file} --model swin_tiny --patch-size 16
attack
attack --attack
attack --attack ""
attack --attack foo
attack --attack patch_embeding
attack --attack grey --attack foo
attack --atack grey
attack grey
attack --attack grey --model nothing
attack --attack grey --model ""
attack --attack grey --data {missing}
attack --attack grey --data {file}
attack --attack grey --data {folder}
attack --attack grey --data ""
attack --attack grey --data {pictures} --limit 3
attack --attack grey --data hub:
attack --attack grey --data http://example.org/x
attack --attack grey --limit 0
attack --attack grey --limit 1.5
attack --attack grey --limit nan
attack --attack grey --limit 999999999999999999999
attack --attack grey --mask-ratio nan
attack --attack grey --mask-ratio inf
attack --attack grey --mask-ratio -0.1
attack --attack grey --mask-ratio 1.01
attack --attack grey --defence mjp:mask_ratio=nan
attack --attack grey --defence mjp:mask_ratio=2
attack --attack grey --defence mjp:
attack --attack grey --defence :
attack --attack grey --defence ""
attack --attack grey --defence mjp --defence mjp
attack --attack grey --defence none --defence mjp --mask-ratio 5
attack --attack grey --defence gaussian:noise=-1
attack --attack grey --defence gaussian:noise=inf
attack --attack grey --defence gaussian:noise=1e999
attack --attack grey --defence local_dp:epsilon=nan
attack --attack grey --defence secure_sum:clients=0
attack --attack grey --defence secure_sum:clients=100000000000
attack --attack grey --defence ünïcode:x=1
attack --attack grey --defence "mjp:mask_ratio=0.2=0.3"
attack --attack grey --defence "mjp:mask_ratio=0.2,mask_ratio=0.3"
attack --attack grey --setting d
attack --attack grey --setting ""
attack --attack grey --setting a --setting a
attack --attack grey --batch-size 0
attack --attack grey --batch-size -1
attack --attack grey --batch-size 3
attack --attack grey --batch-size 99999999999
attack --attack grey --uploads-per-picture 0
attack --attack grey --uploads-per-picture -3
attack --attack grey --local-steps 0
attack --attack grey --local-steps -1
attack --attack grey --local-steps 2 --local-learning-rate nan
attack --attack grey --local-steps 2 --local-learning-rate 0
attack --attack grey --local-steps 2 --local-learning-rate inf
attack --attack grey --local-learning-rate 1
attack --attack grey --set x=1
attack --attack patch_embedding --set reading
attack --attack patch_embedding --set =zeros
attack --attack patch_embedding --set reading=
attack --attack patch_embedding --set reading=zeros --set reading=zeros
attack --attack gradient_matching --set iterations=0
attack --attack gradient_matching --set iterations=-1
attack --attack gradient_matching --set iterations=1e9
attack --attack gradient_matching --set iterations=nan
attack --attack gradient_matching --set learning_rate=nan
attack --attack mjp_prior --defence none --then nothing
attack --attack grey --then ""
attack --attack grey --image-size 0
attack --attack grey --image-size -16
attack --attack grey --image-size 1
attack --attack grey --image-size 225
attack --attack grey --image-size 16x16
attack --attack grey --image-size 100000000
attack --attack grey --image-size 99999999999999999999999
attack --attack grey --image-size 8 --patch-size 8
attack --attack grey --patch-size 0
attack --attack grey --patch-size -16
attack --attack grey --patch-size 16,8
attack --attack grey --patch-size 1 --image-size 4096
attack --attack grey --classes 0
attack --attack grey --classes 1
attack --attack grey --classes 100000000
attack --attack grey --seed -1
attack --attack grey --seed 99999999999999999999999
attack --attack grey --seed 1.0
attack --attack grey --device cuda:0
attack --attack grey --device cuda
attack --attack grey --output ""
attack --attack grey --uploads {missing}
attack --attack grey --uploads {file}
attack --attack grey --uploads {folder}
attack --attack grey --uploads ""
attack --attack grey --uploads {folder} --output {folder}/x
attack --attack grey --uploads {folder} --data bundled
attack --attack grey --uploads {badrecording}
attack --attack grey --uploads {yamlrecording}
attack --attack grey --uploads {pictures}
attack --attack grey --data {pictures} --limit 1 --output {pictures}
attack --attack grey --data {pictures} --limit 1 --output {pictures}/out
record --clients 0
record --clients -1
record --clients 1e3
record --clients 99999999999
record --pictures-per-client 0
record --pictures-per-client 3 --batch-size 2
record --batch-size 0
record --batch-size 2
record --uploads-per-picture 0
record --local-steps 0
record --server-learning-rate -1
record --server-learning-rate nan
record --server-learning-rate inf
record --defence secure_sum:clients=3
record --defence nothing
record --image-size 100000000
record --image-size 15
record --model resnet50
record --model swin_tiny
record --seed -5
record --mask-ratio 0.3
train epochs=1
train recipe.epochs
train =1
train recipe.epochs=
train recipe.epochs=0
train recipe.epochs=-1
train recipe.epochs=nan
train recipe.epochs=twenty
train recipe.epochs=[1
train "recipe.epochs=!!python/object:os.system"
train recipe=1
train recipe=[]
train recipe.epochs.x=1
train recipe.epochs=1e400
train recipe.epochs=99999999999999999999999
train recipe.learning_rate=.nan
train recipe.learning_rate=.inf
train recipe.learning_rate=-1
train recipe.batch_size=0
train recipe.mixup=.nan
train recipe.workers=-1
train model=1
train model.image_size=100000000
train model.image_size=15
train model.weights={missing}
train model.weights={folder}
train puzzle.probability=2 --defence mjp
train --seed -1
train --seed x
train --row nothing
train --row ""
train --config {missing}
train --config {folder}
train --config {empty}
train --config {text}
train --config {list_yaml}
train --config {numbers_yaml}
train --config {loop_yaml}
train --config {binary}
train --data {missing}
train --data {folder}
train --defence gaussian
train --defence nothing
train --device gpu
train device=gpu
train device=1
train data=5
train data=[1]
train defences=5
train defences=[[]]
train defences=[1]
train "defences={{name: mjp, mask_ratio: 7}}"
train checkpoint_every=0
train 🐱=1
train a.b.c.d.e.f=1
train ..=1
train .=1
train recipe..epochs=1
simulate clients=0
simulate --clients 0
simulate --clients -1
simulate --clients 2.5
simulate --clients 99999999999999
simulate --partition nothing
simulate --partition dirichlet --alpha 0
simulate --partition dirichlet --alpha nan
simulate --partition pathological partition.classes_per_client=0
simulate --strategy nothing
simulate --rounds 0
simulate --rounds -1
simulate --rounds 1e2
simulate --local-epochs 0
simulate --participation 0
simulate --participation 2
simulate --participation nan
simulate --uploads 0
simulate --uploads 11
simulate --uploads -1
simulate --uploads x
simulate recipe.epochs=1
simulate training=1
simulate recipe=1
simulate recipe.warmup_epochs=99
simulate rounds=x
simulate batch_size=4
simulate batch_size=4 uploads_per_picture=2 pictures_per_client=8
simulate server_learning_rate=0
simulate server_learning_rate=.nan
simulate model=1
simulate model.name=nothing
simulate model.image_size=100000000
simulate --defence nothing
simulate --defence secure_sum:clients=3
simulate --config {list_yaml}
simulate --row nothing
simulate --seed -1
simulate --device tpu
simulate --output ""
evaluate
evaluate --data bundled
evaluate {folder} --data bundled
evaluate {missing} --data bundled
evaluate {file} --data bundled
evaluate {foreign} --data bundled
evaluate --data bundled --weights {missing} --model name=deit_tiny
evaluate --data bundled --weights {folder} --model name=deit_tiny
evaluate --data bundled --weights {text}
evaluate --data bundled --model name=deit_tiny
evaluate --data bundled --weights {text} --model name
evaluate --data bundled --weights {text} --model nam=deit_tiny
evaluate --data bundled --weights {text} --model name=deit_tiny --mask-ratio 2
evaluate --data bundled --weights {text} --model name=deit_tiny --mask-ratio nan
evaluate --data bundled --weights {text} --model name=deit_tiny --corruption nothing
evaluate --weights {text} --model name=deit_tiny --corruptions
evaluate --weights {text} --model name=deit_tiny --imagenet-o {folder}
evaluate --weights {text} --model name=deit_tiny --imagenet-a ""
evaluate --data bundled --weights {text} --model name=deit_tiny --limit 0
evaluate --data bundled --weights {text} --model name=deit_tiny --workers -1
evaluate --data bundled --weights {text} --model name=deit_tiny --seed -1
evaluate --data {missing} --weights {text} --model name=deit_tiny
campaign rnu
campaign run
campaign run {missing}
campaign run {folder}
campaign run {empty}
campaign run {text}
campaign run {binary}
campaign run {list_yaml}
campaign run {loop_yaml}
campaign run {campaign} data.pictures=0
campaign run {campaign} data.pictures=-1
campaign run {campaign} data.pictures=x
campaign run {campaign} data.pictures
campaign run {campaign} =1
campaign run {campaign} dta.pictures=1
campaign run {campaign} data=1
campaign run {campaign} data.source={missing}
campaign run {campaign} data.source=
campaign run {campaign} data.source=5
campaign run {campaign} name=5
campaign run {campaign} name=../../x
campaign run {campaign} grids=[]
campaign run {campaign} grids=5
campaign run {campaign} grids.5.models=[deit_tiny]
campaign run {campaign} grids.0.models=[nothing]
campaign run {campaign} grids.0.models=[]
campaign run {campaign} grids.0.attacks=[nothing]
campaign run {campaign} grids.0.settings=[d]
campaign run {campaign} grids.0.mask_ratios=[2]
campaign run {campaign} grids.0.mask_ratios=[.nan]
campaign run {campaign} "grids.0.threats=[{{batchsize: 2}}]"
campaign run {campaign} "grids.0.threats=[{{batch_size: 0}}]"
campaign run {campaign} "grids.0.threats=[{{batch_size: -1}}]"
campaign run {campaign} "grids.0.threats=[{{batch_size: x}}]"
campaign run {campaign} image_size=100000000
campaign run {campaign} image_size=0
campaign run {campaign} patch_size=0
campaign run {campaign} classes=999999999999
campaign run {campaign} seeds=[-1]
campaign run {campaign} seeds=[]
campaign run {campaign} metrics=[nothing]
campaign run {campaign} metrics=[]
campaign run {campaign} protocol=x
campaign run {campaign} budget.hours=-1
campaign run {campaign} budget.hours=.nan
campaign run {campaign} keep=x
campaign run {campaign} recognisable_at=.inf
campaign run {campaign} --weights deit_tiny
campaign run {campaign} --weights nothing={text}
campaign run {campaign} --workers -1
campaign run {campaign} --device x
campaign run {missing} --dry
campaign run {campaign} --dry data.pictures=0
campaign status {missing}
campaign status {file}
campaign status {folder}
campaign status {foreign}
campaign status {damaged_results}
campaign status {garbage_results}
campaign verify {missing}
campaign verify {folder} --rerun 1
campaign verify {folder} --rerun -1
campaign verify {damaged_results}
campaign verify {bad_study}
campaign publish {missing} {tmp}/study
campaign publish {damaged_results} {tmp}/study
campaign publish {folder} {file}
leaderboard {missing}
leaderboard {file}
leaderboard {folder}
leaderboard {foreign}
leaderboard {folder} --format pdf
leaderboard {folder} --fresh
leaderboard {damaged_results}
leaderboard {garbage_results}
leaderboard {bad_study}
leaderboard {folder} --database nothing
leaderboard {folder} --database postgresql://nobody@127.0.0.1:1/x
leaderboard add
leaderboard add {missing} --to {folder}
leaderboard add {folder} --to {folder}
leaderboard add {text} --to {folder}
leaderboard add {entry} --to {missing}
leaderboard add {entry} --to {file}
leaderboard add {entry} --to {folder}
attack --attack grey --limit 99999999999
attack --attack grey --output {pictures}/../pictures/x --data {pictures}
simulate --rounds 999999999999
simulate --local-epochs 99999999999
record --uploads-per-picture 99999999999
record --pictures-per-client 99999999999
record --output {pictures}/out --data {pictures}
train --data {pictures} --output {pictures}
evaluate --data {pictures} --output {pictures} --weights {text} --model name=deit_tiny
train "recipe.epochs=0x1F" recipe.warmup_epochs=99
train model.localisation=no
simulate "model={{name: deit_tiny, image_size: 100000}}"
simulate training.recipe.epochs=3
train recipe.compile=maybe
list attacks nothing
--version --nothing
campaign run {campaign} "grids.0.attacks=[{{name: grey, options: {{x: 1}}}}]"
campaign run {campaign} "grids.0.defences=[[mjp, mjp]]"
campaign run {campaign} "grids.0.defences=[{{nme: mjp}}]"
campaign run {campaign} grids.0.pictures=0
campaign run {campaign} grids.x=1
campaign run {campaign} data.ids=[1]
campaign run {campaign} "accuracy={{deit_tiny: 2}}"
campaign run {campaign} reported=[x]
simulate recipe.epochs=5
simulate recipe=[]
simulate rounds=[1]
simulate strategy=5
simulate records=x
simulate records=[99]
simulate records=-1
simulate partition=5
simulate partition.scheme=random
simulate partition.nothing=1
simulate labels_known=maybe
simulate epochs=5
simulate update=delta
train model.defence=mjp
train --data ""
record --data ""
evaluate --data "" --weights {text} --model name=deit_tiny
campaign run {campaign} workers=2
campaign run {campaign} --weights deit_tiny={text} --weights deit_tiny={text}
campaign run {campaign} name=
campaign run {campaign} --dry seeds=x
campaign run {campaign} data.seed=-1
campaign run {campaign} data.name=[1]
campaign run {campaign} "shared={{nothing: 1}}"
campaign run {campaign} --ray nothing:1 --workers 2
campaign run {campaign} shared=5
simulate --rounds 1000000
simulate recipe.epochs=5
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files and folders that nobody should name."""
    root = tmp_path_factory.mktemp("hostile")
    texts = {
        "file": "x",
        "empty": "",
        "text": "these are: [no weights",
        "text.safetensors": "no weights",
        "text.pth": "no weights",
        "empty.pth": "",
        "list_yaml": "[1, 2]",
        "numbers_yaml": "1: 2",
        "loop_yaml": "a: &a [*a]",
        "campaign": CAMPAIGN,
        "entry": json.dumps({"model": "x"}),
    }
    for name, text in texts.items():
        (root / name).write_text(text)
    (root / "binary").write_bytes(bytes(range(256)))
    for name in (
        "folder",
        "foreign",
        "badrecording",
        "yamlrecording",
        "damaged_results",
        "garbage_results",
        "bad_study",
    ):
        (root / name).mkdir()
    for name in ("damaged", "pictures"):
        (root / name / "cat").mkdir(parents=True)
    (root / "foreign" / "thesis.txt").write_text("mine")
    (root / "damaged" / "cat" / "a.png").write_bytes(b"\x89PNG no")
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(root / "pictures" / "cat" / "0.png")
    (root / "badrecording" / "manifest.json").write_text("{")
    (root / "yamlrecording" / "manifest.json").write_text('{"scenarios": 5, "pictures": []}')
    (root / "damaged_results" / "trials.sqlite").write_bytes(b"no database at all" * 100)
    sqlite3.connect(root / "garbage_results" / "trials.sqlite").executescript("create table x(y);")
    (root / "bad_study" / "trials.parquet").write_bytes(b"PAR1 no")
    names = [*texts, "binary", *(path.name for path in root.iterdir() if path.is_dir())]
    return {name: root / name for name in names} | {"missing": root / "missing", "tmp": root}


@pytest.fixture(autouse=True)
def nothing_begins_or_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    def begin(*_: object, **__: object) -> None:
        pytest.fail("it began")

    def stop(*_: object) -> None:
        pytest.fail(f"it did not end in {SECONDS} s")

    for name in BEGINS:
        monkeypatch.setattr(name, begin)
    monkeypatch.chdir(tmp_path)
    former = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


@pytest.mark.parametrize("line", LINES.strip().splitlines())
def test_a_hostile_command_line_is_told_in_one_line(
    line: str,
    places: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedmjp", *shlex.split(line.format(**places))])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert ended.value.code == 2, printed
    assert printed.err.startswith("Error: ")
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "nothing was written"
