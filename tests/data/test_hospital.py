"""What hospitals have: DICOM, NIfTI and a database, made here, read, trained on and counted."""

import json
import sqlite3

import nibabel
import numpy as np
import pandas
import pydicom
import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.census.ask import Ask
from fedfrozen_app.census.record_source import records_of_folder
from fedfrozen_app.census.site import Rules, released_counts
from fedfrozen_app.config import DatasetConfig
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.sources import DatasetSpec, load

NAME = "Doe^John"


def write_dicom(path, pixels: np.ndarray, patient: str = "123", number: int = 1, **more) -> None:
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.TransferSyntaxUID = CTImageStorage, ExplicitVRLittleEndian
    meta.MediaStorageSOPInstanceUID = generate_uid()
    file = Dataset()
    file.file_meta = meta
    file.SOPClassUID, file.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
    file.PatientName, file.PatientID, file.InstanceNumber = NAME, patient, number
    file.SeriesInstanceUID = f"1.2.3.{patient}"
    file.Rows, file.Columns = pixels.shape
    file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
    file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation = 16, 16, 15, 1
    file.RescaleSlope, file.RescaleIntercept = 1, -1000
    file.PixelData = pixels.astype(np.int16).tobytes()
    for key, value in more.items():
        setattr(file, key, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    file.save_as(path, enforce_file_format=True)


def spec(folder, kind: str, **more) -> DatasetSpec:
    return DatasetSpec(name=kind, kind=kind, path=str(folder), test_fraction=0.5, **more)


@pytest.fixture
def scans(tmp_path):
    """Two classes of four patients, three slices each, in the wrong order on the disk."""
    rng = np.random.default_rng(0)
    for label in ("healthy", "ill"):
        for patient in range(4):
            for number in (3, 1, 2):
                pixels = rng.integers(900, 1200, (8, 8))
                name = tmp_path / label / f"p{patient}" / f"{number}.dcm"
                window = {"WindowCenter": 50, "WindowWidth": 100}
                write_dicom(name, pixels, f"{label}{patient}", number, **window)
    (tmp_path / "healthy" / "notes.txt").write_text("no picture")
    return tmp_path


def test_dicom_slices_become_pictures_and_no_name_is_kept(scans):
    from pydicom.pixels import apply_modality_lut, apply_voi_lut

    corpus = load(spec(scans, "dicom"))
    assert corpus.classes == ("healthy", "ill")
    assert len(corpus.train) + len(corpus.test) == 24
    assert corpus.train.inputs["pixel_values"].shape[1:] == (1, 8, 8)
    # Rows of a patient are on one side, and nobody can be told by name.
    assert not set(corpus.columns["patient"]) & set(corpus.test_columns["patient"])
    told = str(corpus.columns) + str(corpus.test_columns)
    assert NAME not in told and "healthy0" not in told
    file = pydicom.dcmread(scans / "healthy" / "p0" / "1.dcm")
    seen = apply_voi_lut(apply_modality_lut(file.pixel_array, file), file)
    expected = np.clip((seen - seen.min()) / (seen.max() - seen.min()) * 255, 0, 255)
    everything = np.concatenate([part.inputs["pixel_values"].numpy() for part in (corpus.train, corpus.test)])
    assert np.abs(everything[:, 0].astype(float) - expected).max(axis=(1, 2)).min() <= 1.0


def test_windows_slices_inverted_pictures_and_frames(tmp_path):
    pixels = np.arange(64).reshape(8, 8) + 1000  # 0 to 63 after the rescaling
    for label in ("a", "b"):
        write_dicom(tmp_path / label / "1.dcm", pixels, label)
        write_dicom(tmp_path / label / "2.dcm", pixels, label, 2, PhotometricInterpretation="MONOCHROME1")
    plain, inverted = load_pictures(tmp_path, window=(32.0, 64.0))[:2]
    np.testing.assert_array_equal(plain, np.clip((np.arange(64) / 64 * 255).round(), 0, 255).reshape(8, 8))
    np.testing.assert_array_equal(inverted, 255 - plain)
    assert len(load_pictures(tmp_path, slices=1)) == 2
    (tmp_path / "b" / "3.dcm").write_bytes((tmp_path / "b" / "1.dcm").read_bytes()[:-40])
    with pytest.raises(UserError, match="cannot be read"):
        load_pictures(tmp_path)


def load_pictures(folder, kind: str = "dicom", **more) -> list[np.ndarray]:
    dataset = DatasetConfig(name=kind, kind=kind, path=str(folder), **{k: _plain(v) for k, v in more.items()})
    return list(records_of_folder(dataset).content)


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


def test_nifti_volumes_are_cut_into_slices(tmp_path):
    volume = np.arange(4 * 5 * 6, dtype=np.float32).reshape(4, 5, 6)
    for label, name in (("a", "sub-01_T1w.nii.gz"), ("a", "sub-01_T2w.nii.gz"), ("b", "sub-02_T1w.nii")):
        (tmp_path / label).mkdir(exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), tmp_path / label / name)
    records = records_of_folder(DatasetConfig(name="n", kind="nifti", path=str(tmp_path)))
    assert len(records) == 18 and len(records.names) == 2  # both volumes of a are one person's
    assert "sub-01" not in str(records.columns)
    low, high = np.percentile(volume, (0.5, 99.5))
    expected = np.clip((volume[:, :, 3] - low) / (high - low) * 255, 0, 255).round().astype(np.uint8)
    np.testing.assert_array_equal(records.content[3], np.rot90(expected))
    assert len(load_pictures(tmp_path, "nifti", slices=2)) == 6
    (tmp_path / "b" / "broken.nii").write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot be read"):
        load_pictures(tmp_path, "nifti")


# A database -----------------------------------------------------------------------------------------------

QUERY = """
SELECT p.person_id, 2024 - p.year_of_birth AS age, g.concept_name AS sex, n.note_text AS text,
       CASE WHEN c.condition_concept_id = 255848 THEN 'pneumonia' ELSE 'other' END AS label
FROM person p JOIN note n ON n.person_id = p.person_id
JOIN condition_occurrence c ON c.person_id = p.person_id
LEFT JOIN concept g ON g.concept_id = p.gender_concept_id
"""


@pytest.fixture
def cdm(tmp_path):
    """The tables of OMOP-CDM v5.4 that a cohort of notes needs, with made-up people."""
    rng = np.random.default_rng(0)
    people = 120
    ids = np.arange(1, people + 1)
    conditions = rng.choice([255848, 312327], people)
    notes = rng.integers(1, 3, people)
    tables = {
        "person": {"person_id": ids, "gender_concept_id": rng.choice([8507, 8532, 0], people),
                   "year_of_birth": rng.integers(1930, 2010, people)},
        "concept": {"concept_id": [8507, 8532], "concept_name": ["MALE", "FEMALE"]},
        "condition_occurrence": {"person_id": ids, "condition_concept_id": conditions},
        "note": {"person_id": np.repeat(ids, notes),
                 "note_text": [f"note {n} of the patient with a fever" for n in range(notes.sum())]},
    }  # fmt: skip
    path = tmp_path / "cdm.sqlite"
    with sqlite3.connect(path) as connection:
        for name, table in tables.items():
            pandas.DataFrame(table).to_sql(name, connection, index=False)
    return path


def test_the_census_of_a_database_is_what_pandas_counts(cdm):
    columns = {"age": (0.0, 18.0, 40.0, 65.0, 100.0), "sex": ("FEMALE", "MALE")}
    dataset = DatasetConfig(name="cdm", kind="omop", path=str(cdm), query=QUERY)
    told = released_counts(Ask("test", columns=columns), records_of_folder(dataset), Rules(1, columns), {})
    with sqlite3.connect(cdm) as connection:
        frame = pandas.read_sql(QUERY, connection)
    assert (told["rows"], told["people"]) == (len(frame), frame["person_id"].nunique())
    rows = {name: count for name, count in told["tables"]["classes"]["rows"].items() if count}
    assert rows == frame["label"].value_counts().to_dict()
    assert told["moments"]["numbers/age"]["mean"] == pytest.approx(frame["age"].mean())
    assert told["moments"]["numbers/age"]["variance"] == pytest.approx(frame["age"].var(ddof=0))
    edges = columns["age"]
    assert told["tables"]["numbers/age"]["rows"] == np.histogram(frame["age"], edges)[0].tolist()
    sexes = told["tables"]["words/sex"]["rows"]
    assert (sexes["FEMALE"], sexes["MALE"]) == tuple(
        (frame["sex"] == name).sum() for name in ("FEMALE", "MALE")
    )
    assert sexes["(none)"] == frame["sex"].isna().sum() == told["tables"]["missing/sex"]["rows"]["missing"]
    held = frame.groupby("label")["person_id"].nunique()
    assert told["tables"]["classes"]["people"]["pneumonia"] == held["pneumonia"]
    lengths = frame["text"].str.len()
    assert told["moments"]["length"]["mean"] == pytest.approx(lengths.mean())


def test_tables_become_texts_and_a_run_trains_on_them(cdm, tmp_path):
    query = "SELECT person_id, year_of_birth AS born, gender_concept_id AS sex, " \
            "CASE WHEN gender_concept_id = 8507 THEN 'm' ELSE 'f' END AS label FROM person"  # fmt: skip
    records = records_of_folder(DatasetConfig(name="cdm", kind="omop", path=str(cdm), query=query))
    assert records.content[0].startswith("born: 19") and "; sex: " in records.content[0]
    tiny = ["hidden_size=16", "intermediate_size=32", "num_hidden_layers=1", "num_attention_heads=2"]
    line = [
        "dataset=omop", f"dataset.path={cdm}", f'dataset.query="{query}"', "dataset.max_tokens=32",
        "num_rounds=1", "num_clients=2", "partition=iid", "strategy=fedavg", f"output_dir={tmp_path}/run",
        *(f"model.config.{word}" for word in tiny),
    ]  # fmt: skip
    assert command(line) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["final_test_accuracy"] >= 0


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        (None, "dataset.query is missing"),
        ("SELECT 1 AS label", "no column person_id"),
        ("SELECT person_id, 'a' AS label FROM person WHERE 0", "no rows"),
        ("SELECT person_id, 'a' AS label FROM person", "neither text nor columns"),
        ("SELECT * FROM nowhere", "could not be asked"),
        ("DELETE FROM person", "could not be asked"),
    ],
)
def test_a_query_that_gives_no_rows_to_train_on_is_a_sentence(cdm, query, sentence):
    with pytest.raises(UserError, match=sentence):
        load(spec(cdm, "omop", query=query))
    with sqlite3.connect(cdm) as connection:  # and the database is only read
        assert connection.execute("SELECT count(*) FROM person").fetchone() == (120,)
    with pytest.raises(UserError, match="no database file"):
        load(spec(cdm.parent / "none.sqlite", "omop", query=QUERY))


def test_only_the_site_says_the_query(cdm):
    """A view has one; a proposal has no key for it, and neither has a census."""
    from fedfrozen_app.census.ask import read_ask
    from fedfrozen_app.exchange.strict import canonical
    from fedfrozen_app.sites.views import read_views

    notes = {"kind": "omop", "path": cdm.name, "query": QUERY, "classes": ["other", "pneumonia"]}
    given = {"views": {"notes": notes | {"unit": "patient", "unit_column": "person_id"}}}
    view = read_views(given, cdm.parent / "site.yaml")["notes"]
    assert view.path == str(cdm) and view.dataset().query == QUERY
    given["views"]["notes"]["path"] = "postgresql://cdm.hospital/omop"
    assert read_views(given, cdm.parent / "site.yaml")["notes"].path == "postgresql://cdm.hospital/omop"
    with pytest.raises(ValueError, match="other keys"):
        read_ask(canonical(Ask("x").plain | {"query": "SELECT * FROM person"}))
