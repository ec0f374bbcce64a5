import gzip
import io
import json
import logging

import datasets
import huggingface_hub.constants
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.sources import DatasetSpec, load
from fedfrozen_app.data.sources.digits import _digits


def images_spec(path, **options):
    return DatasetSpec(name="x", kind="images", path=str(path), **options)


def parquet_spec(path, **options):
    return DatasetSpec(name="x", kind="parquet", path=str(path), **options)


def text_spec(path, **options):
    return DatasetSpec(name="x", kind="text", path=str(path), **options)


def save_image(path, value, size=(4, 4), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


def png(value, size=(4, 4)):
    buffer = io.BytesIO()
    Image.new("RGB", size, value).save(buffer, "PNG")
    return buffer.getvalue()


def save_parquet(path, features, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(columns, datasets.Features(features)).to_parquet(str(path))


IMAGE_AND_CLASS = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["zebra", "ant"])}


# ---- digits, the split and the numbers that come with it ----


def test_the_digits_are_scikit_learn_s():
    """Read from its file, without it."""
    pixels, targets = _digits()
    images, labels = load_digits(return_X_y=True)
    assert np.array_equal(targets, labels)
    assert np.array_equal(pixels.reshape(-1, 64), images.astype(int) * 255 // 16)


def test_digits_are_scaled_and_split_by_class():
    corpus = load(DatasetSpec())
    pixels = corpus.train.inputs["pixel_values"]
    assert pixels.dtype == torch.uint8 and pixels.shape[1:] == (1, 8, 8)
    assert (corpus.task, corpus.classes) == ("image", tuple("0123456789"))
    assert len(corpus.train) + len(corpus.test) == 1797
    totals = np.bincount(load_digits().target)
    held_out = torch.bincount(corpus.test.labels).numpy()
    assert held_out.tolist() == [round(0.2 * total) for total in totals]
    # 0..16 becomes 0..255 by value * 255 // 16: 8 is 127, 16 is 255.
    assert set(pixels.unique().tolist()) == {value * 255 // 16 for value in range(17)}
    scaled = pixels.double() / 255
    assert corpus.mean == pytest.approx((scaled.mean().item(),))
    assert corpus.std == pytest.approx((scaled.std(correction=0).item(),))


def test_the_split_depends_on_its_own_seed_only():
    def test_pixels(**options):
        return load(DatasetSpec(**options)).test.inputs["pixel_values"]

    assert torch.equal(test_pixels(), test_pixels(mean=(0.5,), std=(0.5,)))
    assert not torch.equal(test_pixels(), test_pixels(split_seed=1))


def test_limit_size_and_given_statistics():
    corpus = load(DatasetSpec(limit=30, image_size=16, channels=3, mean=(0.1,) * 3, std=(0.2,) * 3))
    assert len(corpus.train) == len(corpus.test) == 30
    assert corpus.train.inputs["pixel_values"].shape == (30, 3, 16, 16)
    assert (corpus.mean, corpus.std) == ((0.1,) * 3, (0.2,) * 3)
    assert len(corpus.classes) == 10


def test_no_test_rows_when_none_are_asked_for():
    corpus = load(DatasetSpec(test_fraction=0.0))
    assert len(corpus.train) == 1797
    assert corpus.test.inputs["pixel_values"].shape == (0, 1, 8, 8)


# ---- image folders ----


def test_image_folder_with_train_and_test(tmp_path):
    save_image(tmp_path / "train/cat/1.png", (255, 0, 51))
    save_image(tmp_path / "train/ant/1.JPG", (0, 0, 0))
    save_image(tmp_path / "test/cat/2.png", (1, 2, 3))
    (tmp_path / "train/cat/notes.txt").write_text("not an image")
    corpus = load(images_spec(tmp_path))
    assert corpus.classes == ("ant", "cat")
    assert corpus.train.labels.tolist() == [0, 1]
    assert corpus.train.inputs["pixel_values"][1, :, 0, 0].tolist() == [255, 0, 51]
    assert corpus.test.inputs["pixel_values"][0, :, 3, 3].tolist() == [1, 2, 3]
    # One row of 255, 0, 51 and one of zeros: half of each, and as much spread.
    assert corpus.mean == pytest.approx((0.5, 0.0, 0.1))
    assert corpus.std == pytest.approx((0.5, 1.0, 0.1))
    assert corpus.columns == {}


def test_image_folder_of_classes_holds_out_a_test_set(tmp_path, caplog):
    for number in range(10):
        save_image(tmp_path / f"ant/{number}.png", number, mode="L")
    save_image(tmp_path / "bee/0.png", 100, mode="L")
    with caplog.at_level(logging.INFO):
        corpus = load(images_spec(tmp_path, test_fraction=0.3))
    assert "layout class/image" in caplog.text
    # The only bee trains; grey images stay at one channel.
    assert torch.bincount(corpus.train.labels).tolist() == [7, 1]
    assert corpus.test.labels.tolist() == [0, 0, 0]
    assert corpus.train.inputs["pixel_values"].shape == (8, 1, 4, 4)
    seen = torch.cat([corpus.train.inputs["pixel_values"], corpus.test.inputs["pixel_values"]])
    assert sorted(seen[:, 0, 0, 0].tolist()) == [*range(10), 100]


@pytest.mark.parametrize("below", ["", "images/"])
def test_image_folder_of_domains(tmp_path, caplog, below):
    for domain, value in (("art", 10), ("photo", 20)):
        for label in ("cat", "dog"):
            for number in range(3):
                save_image(tmp_path / f"{domain}/{below}{label}/{number}.png", (value,) * 3)
    with caplog.at_level(logging.INFO):
        corpus = load(images_spec(tmp_path, channels=1))
    assert "layout domain/class/image" in caplog.text
    assert corpus.classes == ("cat", "dog")
    values = corpus.train.inputs["pixel_values"][:, 0, 0, 0].tolist()
    assert [{10: "art", 20: "photo"}[value] for value in values] == corpus.columns["domain"].tolist()


def test_numbered_folders_get_their_names_from_the_data(tmp_path):
    """As Flowers-102 usually comes: folders are numbers, and a file beside them says what they mean."""
    for part in ("train", "valid", "test"):
        for number in ("1", "10"):
            save_image(tmp_path / f"{part}/{number}/x.png", (int(number),) * 3)
    names = {"1": "pink primrose", "10": "globe thistle", "102": "blackberry lily"}
    (tmp_path / "cat_to_name.json").write_text(json.dumps(names))
    corpus = load(images_spec(tmp_path, channels=1))
    assert corpus.classes == ("globe thistle", "pink primrose")
    assert corpus.train.inputs["pixel_values"][:, 0, 0, 0].tolist() == [1, 10]
    assert corpus.train.labels.tolist() == corpus.test.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{oops", "cat_to_name.json is no JSON object"),
        ('["a"]', "cat_to_name.json is no JSON object"),
        ('{"1": "rose"}', "no name for the folder 2"),
        ('{"1": "rose", "2": 5}', "no name for the folder 2"),
    ],
)
def test_names_that_cannot_be_read(tmp_path, content, sentence):
    for number in ("1", "2"):
        save_image(tmp_path / f"{number}/x.png", (0, 0, 0))
    (tmp_path / "cat_to_name.json").write_text(content)
    with pytest.raises(UserError, match=sentence):
        load(images_spec(tmp_path))


def test_sixteen_bit_images_keep_their_contrast(tmp_path):
    for label, value in (("a", 0x8000), ("b", 0xFF00)):
        (tmp_path / label).mkdir()
        Image.fromarray(np.full((2, 2), value, dtype=np.uint16)).save(tmp_path / label / "x.png")
    pixels = load(images_spec(tmp_path)).train.inputs["pixel_values"]
    assert pixels[:, 0, 0, 0].tolist() == [0x80, 0xFF]


def test_images_of_many_sizes_need_a_size(tmp_path):
    save_image(tmp_path / "a/1.png", (9, 9, 9), size=(4, 4))
    save_image(tmp_path / "b/1.png", (9, 9, 9), size=(6, 5))
    with pytest.raises(UserError, match=r"b/1.png is 6x5 pixels .* set dataset.image_size"):
        load(images_spec(tmp_path))
    pixels = load(images_spec(tmp_path, image_size=8)).train.inputs["pixel_values"]
    assert pixels.shape == (2, 3, 8, 8) and pixels.unique().tolist() == [9]


def test_broken_images_are_named(tmp_path):
    save_image(tmp_path / "a/1.png", (0, 0, 0))
    save_image(tmp_path / "b/1.png", (0, 0, 0))
    whole = (tmp_path / "b/1.png").read_bytes()
    for content in (b"nonsense", whole[: len(whole) // 2]):
        (tmp_path / "b/1.png").write_bytes(content)
        with pytest.raises(UserError, match=r"Cannot read the image .*b/1\.png"):
            load(images_spec(tmp_path))


def test_unusable_image_folders(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load(images_spec(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="No images found"):
        load(images_spec(tmp_path))
    save_image(tmp_path / "a/1.png", (0, 0, 0))
    with pytest.raises(UserError, match=r"1 class \(a\): at least 2"):
        load(images_spec(tmp_path))
    save_image(tmp_path / "b/c/1.png", (0, 0, 0))
    with pytest.raises(UserError, match="mixes two layouts"):
        load(images_spec(tmp_path))


def test_a_class_that_only_the_test_rows_have(tmp_path):
    for name in ("train/a", "train/b", "test/c"):
        save_image(tmp_path / name / "1.png", (0, 0, 0))
    with pytest.raises(UserError, match=r"Label 'c' of .*1\.png is not among the classes of the"):
        load(images_spec(tmp_path))


# ---- a site that must agree with others on the classes ----


def test_agreed_classes_fix_the_order(tmp_path):
    save_image(tmp_path / "b/1.png", (0, 0, 0))
    save_image(tmp_path / "b/2.png", (0, 0, 0))
    corpus = load(images_spec(tmp_path), classes=("c", "b", "a"))
    assert corpus.classes == ("c", "b", "a")
    assert corpus.train.labels.tolist() == [1]
    with pytest.raises(UserError, match=r"Label 'b' .* not among the agreed classes \(c, a\)"):
        load(images_spec(tmp_path), classes=("c", "a"))


# ---- parquet ----


def test_parquet_with_image_feature_and_class_names(tmp_path):
    for file, values in (
        ("data/train-00000-of-00002.parquet", [1, 2]),
        ("data/train-00001-of-00002.parquet", [3]),
        ("data/test-00000-of-00001.parquet", [4]),
        ("data/validation-00000-of-00001.parquet", [5]),
    ):
        images = [{"bytes": png((value, 0, 0)), "path": None} for value in values]
        labels = [value % 2 for value in values]
        save_parquet(tmp_path / file, IMAGE_AND_CLASS, image=images, label=labels)
    corpus = load(parquet_spec(tmp_path))
    assert corpus.classes == ("zebra", "ant")  # the file's own order, not the alphabet's
    assert corpus.train.inputs["pixel_values"][:, 0, 0, 0].tolist() == [1, 2, 3]
    assert corpus.train.labels.tolist() == [1, 0, 1]
    assert corpus.test.inputs["pixel_values"][:, 0, 0, 0].tolist() == [4]


def test_parquet_files_without_split_names_are_domains(tmp_path):
    for number, domain in enumerate(["art", "photo"]):
        images = [{"bytes": png((number, 0, 0)), "path": None}] * 4
        save_parquet(tmp_path / f"{domain}.parquet", IMAGE_AND_CLASS, image=images, label=[0, 1] * 2)
    corpus = load(parquet_spec(tmp_path, test_fraction=0.5))
    values = corpus.train.inputs["pixel_values"][:, 0, 0, 0].tolist()
    assert corpus.columns["domain"].tolist() == [["art", "photo"][value] for value in values]
    assert len(corpus.train) == len(corpus.test) == 4


def test_parquet_without_hugging_face_metadata(tmp_path):
    table = pa.table({"scan": [png((7, 7, 7)), png((8, 8, 8))], "label": [10, 9], "ward": [3, 4]})
    pq.write_table(table, tmp_path / "train.parquet")
    corpus = load(parquet_spec(tmp_path / "train.parquet"))
    assert corpus.classes == ("9", "10")
    assert corpus.train.labels.tolist() == [1, 0]
    assert corpus.columns["ward"].dtype == np.int64


def test_parquet_text_and_secret_test_labels(tmp_path):
    features = {
        "sentence": datasets.Value("string"),
        "label": datasets.ClassLabel(names=["no", "yes"]),
    }
    save_parquet(tmp_path / "train.parquet", features, sentence=["ab", "c"], label=[1, 0])
    save_parquet(tmp_path / "test.parquet", features, sentence=["d"], label=[-1])
    with pytest.raises(UserError, match="None of the 1 rows of 'test' has both content and a"):
        load(parquet_spec(tmp_path))
    corpus = load(parquet_spec(tmp_path, test_split="none"))
    assert corpus.task == "text" and corpus.classes == ("no", "yes")


def test_parquet_errors(tmp_path):
    images = [{"bytes": b"broken", "path": None}, {"bytes": png((0, 0, 0)), "path": None}]
    save_parquet(tmp_path / "train.parquet", IMAGE_AND_CLASS, image=images, label=[0, 1])
    with pytest.raises(UserError, match=r"Cannot read the image row 0 of train\.parquet"):
        load(parquet_spec(tmp_path))
    with pytest.raises(UserError, match="'kind' is not a column: the data have image, label"):
        load(parquet_spec(tmp_path, label_column="kind"))
    with pytest.raises(UserError, match=r"dataset\.image_column='label' holds no images"):
        load(parquet_spec(tmp_path, image_column="label"))
    (tmp_path / "train.parquet").write_bytes(b"not parquet")
    with pytest.raises(UserError, match="cannot be read as parquet"):
        load(parquet_spec(tmp_path))


# ---- text ----

ROWS = [
    {"text": "abc", "label": "b", "site": "north", "tags": ["x"], "split": "train"},
    {"text": "de", "label": "a", "site": None, "tags": [], "split": "train"},
    {"text": "   ", "label": "a", "site": "south", "tags": [], "split": "train"},
    {"text": "f", "label": None, "site": "south", "tags": [], "split": "train"},
    {"text": "ghij", "label": "a", "site": "south", "tags": [], "split": "test"},
    {"text": "k", "label": "a", "site": "south", "tags": [], "split": "dev"},
]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_json_lines_with_a_split_field(tmp_path, caplog):
    (tmp_path / "notes.jsonl.gz").write_bytes(gzip.compress(lines(ROWS).encode()))
    with caplog.at_level(logging.INFO):
        corpus = load(text_spec(tmp_path))
    assert "dropped 2 of 4 rows" in caplog.text and "1 row not read" in caplog.text
    assert corpus.task == "text" and corpus.classes == ("a", "b")
    # Bytes as ByT5 numbers them: a is 97 + 3, then the end token 1; train and test equally wide.
    assert corpus.train.inputs["input_ids"].tolist() == [[100, 101, 102, 1, 0], [103, 104, 1, 0, 0]]
    assert corpus.train.inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]
    assert corpus.test.inputs["input_ids"].tolist() == [[106, 107, 108, 109, 1]]
    assert corpus.train.inputs["input_ids"].dtype == torch.int64
    assert {name: column.tolist() for name, column in corpus.columns.items()} == {"site": ["north", ""]}
    assert (corpus.pad_token_id, corpus.mean) == (0, ())
    assert corpus.vocab_size > 258


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path):
    (tmp_path / "notes.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(ROWS).encode())
    assert load(text_spec(tmp_path)).classes == ("a", "b")


def test_blanks_around_a_label_make_no_other_class(tmp_path):
    (tmp_path / "notes.csv").write_text("text,label\na, x\nb,y\nc,x \nd,y\ne,  \n")
    assert load(text_spec(tmp_path)).classes == ("x", "y")


def test_blanks_around_a_patient_s_number_make_no_other_patient(tmp_path):
    """Two units would each be covered by an epsilon, and the one person that they are by twice that."""
    (tmp_path / "notes.csv").write_text("text,label,patient\na,x,p1\nb,y, p1\nc,x,p1 \nd,y,p2\n")
    corpus = load(text_spec(tmp_path, unit_column="patient", test_fraction=0.0))
    assert corpus.columns["patient"].tolist() == ["p1", "p1", "p1", "p2"]
    assert corpus.units.tolist() == [0, 0, 0, 1]


def test_a_patient_in_both_of_the_data_s_own_splits_is_said(tmp_path, caplog):
    (tmp_path / "train.csv").write_text("text,label,patient\na,x,1\nb,y,2\nc,y,\n")
    (tmp_path / "test.csv").write_text("text,label,patient\nd,x,1\ne,y,3\nf,y,\n")
    load(text_spec(tmp_path))
    assert "patient" not in caplog.text
    load(text_spec(tmp_path, unit_column="patient"))
    assert "1 patient of the test rows has train rows too" in caplog.text
    (tmp_path / "test.csv").write_text("text,label\nd,x\n")
    with pytest.raises(UserError, match="test rows have no column 'patient'"):
        load(text_spec(tmp_path, unit_column="patient"))


def test_csv_with_train_and_test_files(tmp_path):
    (tmp_path / "train.csv").write_text('id,sentence,label\n007,"a, b\nc",XA\n008,d,10\n009,,9\n')
    (tmp_path / "test.csv").write_text("id,sentence,label\n1,e,10\n")
    corpus = load(text_spec(tmp_path, max_tokens=4))
    assert corpus.classes == ("10", "XA")
    assert corpus.columns["id"].tolist() == ["007", "008"]
    assert corpus.train.inputs["input_ids"].tolist() == [[100, 47, 35, 1], [103, 1, 0, 0]]
    assert corpus.test.labels.tolist() == [0]


def test_text_files_of_several_sites_are_domains(tmp_path):
    for site in ("north", "south"):
        (tmp_path / f"{site}.tsv").write_text("text\tlabel\n" + "x\t1\ny\t0\n" * 2)
    corpus = load(text_spec(tmp_path, test_fraction=0.5))
    assert set(corpus.columns["domain"]) <= {"north", "south"}
    assert len(corpus.train) == len(corpus.test) == 4


def test_only_the_classes_to_keep(tmp_path):
    rows = [{"text": "x", "label": label} for label in "abcabc"]
    (tmp_path / "train.jsonl").write_text(lines(rows))
    corpus = load(text_spec(tmp_path, keep_classes=("c", "a")))
    assert corpus.classes == ("c", "a")
    assert len(corpus.train) == len(corpus.test) == 2
    with pytest.raises(UserError, match="names 'd', which no train row has"):
        load(text_spec(tmp_path, keep_classes=("c", "d")))


def test_a_tokenizer_without_padding_pads_with_its_end_token(tmp_path):
    (tmp_path / "train.jsonl").write_text(
        lines([{"text": "one two", "label": 0}, {"text": "two", "label": 1}])
    )
    words = Tokenizer(WordLevel({"<end>": 0, "one": 1, "two": 2}, unk_token="<end>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    corpus = load(text_spec(tmp_path), tokenizer)
    assert corpus.train.inputs["input_ids"].tolist() == [[1, 2], [2, 0]]
    assert (corpus.vocab_size, corpus.pad_token_id) == (3, 0)


@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        ('{"text": "a", "label": 1}\n{oops\n', {}, r"Line 2 of .*train\.jsonl is not valid JSON"),
        ("[1]\n", {}, "is not a JSON object"),
        (lines([{"text": "a", "kind": 1}]), {}, "Set dataset.label_column .* have text, kind"),
        (lines([{"label": 1, "note": "a"}]), {}, "Set dataset.text_column .* have label, note"),
        (lines([{"text": "a", "label": 1, "class": 2}]), {}, "Set dataset.label_column"),
        (lines(ROWS), {"label_column": "tags"}, "'tags' holds more than one value in line 1"),
        (lines(ROWS), {"text_column": "body"}, "'body' is not a column: the data have text, la"),
        (lines([{"text": "a", "label": 1}]), {}, r"1 class \(1\)"),
        (lines([{"text": "a", "label": None}]), {}, "None of the 1 rows"),
    ],
)
def test_unusable_text_files(tmp_path, content, options, sentence):
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(UserError, match=sentence):
        load(text_spec(tmp_path, **options))


def test_unusable_text_folders(tmp_path):
    with pytest.raises(UserError, match=r"No \.csv or .* file found"):
        load(text_spec(tmp_path))
    (tmp_path / "test.csv").write_text("text,label\na,1\n")
    with pytest.raises(UserError, match="'test' file but no 'train' file"):
        load(text_spec(tmp_path))
    (tmp_path / "train.csv").write_text("")
    with pytest.raises(UserError, match="holds no table"):
        load(text_spec(tmp_path))
    (tmp_path / "notes.doc").write_text("")
    with pytest.raises(UserError, match=r"is not a \.csv or"):
        load(text_spec(tmp_path / "notes.doc"))


# ---- hub ----


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub's client, offline and with a cache of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_hub_by_name(tmp_path, hub):
    # load_dataset takes a folder in place of a name, and then needs no network.
    images = [{"bytes": png((value, 0, 0)), "path": None} for value in (1, 2)]
    save_parquet(tmp_path / "set/train.parquet", IMAGE_AND_CLASS, image=images, label=[1, 0])
    save_parquet(tmp_path / "set/test.parquet", IMAGE_AND_CLASS, image=images[:1], label=[1])
    spec = DatasetSpec(name="x", kind="hub", path=str(tmp_path / "set"))
    corpus = load(spec)
    assert corpus.classes == ("zebra", "ant")
    assert corpus.train.inputs["pixel_values"][:, 0, 0, 0].tolist() == [1, 2]
    assert corpus.test.labels.tolist() == [1]
    with pytest.raises(UserError, match=r"set dataset\.train_split to one of train, test"):
        load(DatasetSpec(name="x", kind="hub", path=str(tmp_path / "set"), train_split="all"))


def test_hub_without_network(hub):
    with pytest.raises(UserError, match="Could not load 'nobody/nothing' from the Hugging Face"):
        load(DatasetSpec(name="x", kind="hub", path="nobody/nothing"))


# ---- options ----


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "video"}, "choose one of digits, digit_words, images, parquet, text, hub"),
        ({"kind": "images"}, "dataset.path is missing"),
        ({"channels": 2}, "dataset.channels=2"),
        ({"image_size": 0}, "dataset.image_size=0"),
        ({"test_fraction": 1.0}, "dataset.test_fraction=1.0"),
        ({"limit": 0}, "dataset.limit=0"),
        ({"max_tokens": 1}, "dataset.max_tokens=1"),
        ({"mean": (0.5, 0.5, 0.5)}, "dataset.mean has 3 values but the images have 1 channels"),
        ({"std": (0.0,)}, "must be above 0"),
    ],
)
def test_bad_options(options, sentence):
    with pytest.raises(UserError, match=sentence):
        load(DatasetSpec(**options))
