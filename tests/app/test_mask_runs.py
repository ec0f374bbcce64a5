"""Whole runs on pictures with masks: both runners, strategies, privacy, sample masks and export."""

import numpy as np
import pytest
from PIL import Image

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.launch import load_run
from fedfrozen_app.report.run_page import run_page
from fedfrozen_app.run.export_folder import write_export
from tests.data.masked import draw
from tests.local.runners import THREE_ROUNDS, compare

MODELS = {
    "unet": ["model=unet", "model.config.width=4", "model.config.levels=2"],
    "vit_segmenter": [
        "model=vit_segmenter",
        "model.config.hidden_size=8",
        "model.config.intermediate_size=16",
        "model.config.num_hidden_layers=2",
        "model.config.num_attention_heads=2",
        "model.config.patch_size=4",
        "model.config.decoder_width=4",
    ],
}


@pytest.fixture
def folder(tmp_path):
    """Two sites of unlike sizes."""
    return draw(tmp_path / "pictures", sites=("east", "west"))


def words(folder, model, *more):
    data = ["dataset=masks", f"dataset.path={folder}", "partition=natural", "partition.column=domain"]
    own = ["num_clients=null", "partition.min_size=2", "client.batch_size=4", "runtime.threads=1"]
    return [*data, *MODELS[model], *own, "track.tensorboard=false", *more]


@pytest.mark.parametrize(
    ("model", "strategy"),
    [("vit_segmenter", "fedfrozen"), pytest.param("unet", "fedprox", marks=pytest.mark.slow)],
)
def test_both_runners_train_the_same_model_in_float64(train, folder, model, strategy):
    """Sites with unlike numbers of batches, so that some rows are padding."""
    given = words(folder, model, f"strategy={strategy}", "model.dtype=float64", *THREE_ROUNDS)
    one = train(*given, "runtime.runner=sequential", folder="one", small=False)
    other = train(*given, "runtime.runner=cohort", folder="other", small=False)
    compare(one, other, 1e-9, per_tensor=True)
    for row, twin in zip(one.rows, other.rows, strict=True):
        for name in ("dice", "iou", "hd95"):
            assert row[f"test_{name}"] == pytest.approx(twin[f"test_{name}"], abs=1e-9)
    assert one.summary["final_test_dice"] == one.rows[-1]["test_dice"]
    assert "majority_dice" in one.summary


def test_the_report_shows_masks_beside_the_truth(train, folder):
    run = train(*words(folder, "unet", "strategy=fedavg", "num_rounds=1"), small=False)
    sheet = np.asarray(Image.open(run.folder / "samples.png"))
    assert sheet.shape[2] == 3 and sheet.shape[1] > 2.9 * 160
    assert "<h2>Masks</h2>" in run_page(run.folder)
    with pytest.raises(UserError, match="no model of this run's kind that gives a class for each pixel"):
        write_export(load_run(run.folder, [], trusted=True), run.folder, run.folder / "export", merged=True)
    assert not (run.folder / "export").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("vit_segmenter", ["strategy=safl"]),
        ("vit_segmenter", ["strategy=fedavg", "adapter=lora", "adapter.rank=2"]),
        ("unet", ["strategy=fedper"]),
        ("unet", ["strategy=scaffold", "client=sgd"]),
        ("unet", ["strategy=ditto"]),
        ("unet", ["strategy=fedavg", "dataset.augment=crop_flip"]),
        ("unet", ["strategy=fedavg", "secure_aggregation=on", "secure_aggregation.min_cohort=2"]),
        ("unet", ["strategy=fedavg", "privacy=dp_sgd", "privacy.epsilon=8", "client=sgd"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
def test_methods_act_on_masks(train, folder, model, more):
    run = train(*words(folder, model, "num_rounds=2", *more), small=False)
    assert run.rows[-1]["round"] == 2


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["strategy=fedfrozen"], "attention"),
        (["strategy=moon"], "contrasts one representation a row"),
        (["strategy=fedavg", "client.class_weights=true"], "needs one label for each row"),
    ],
    ids=["fedfrozen", "moon", "class weights"],
)
def test_what_cannot_be_ends_with_a_sentence(train, folder, more, sentence):
    with pytest.raises(UserError, match=sentence):
        train(*words(folder, "unet", "num_rounds=1", *more), small=False)
