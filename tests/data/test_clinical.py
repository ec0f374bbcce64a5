"""Readers of clinical text, on files written here in each format, down to tensors and shares."""

import gzip
import logging

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.federated import client_rows, load_corpus, share_out
from fedfrozen_app.data.sources import DatasetSpec, load, prepare
from fedfrozen_app.data.sources.entities import iob2, tag_spans
from fedfrozen_app.data.sources.labels import unit_numbers
from fedfrozen_app.data.sources.raw_rows import Rows
from fedfrozen_app.data.sources.synthetic import word_tokenizer
from fedfrozen_app.data.table import CONTINUED, IGNORED


def spec(kind, path, **options):
    return DatasetSpec(name="x", kind=kind, path=str(path), **options)


def words_of(corpus, row, table="train"):
    """(word, tag) of a row that was read as bytes: what the tensors still say."""
    part = getattr(corpus, table)
    ids, labels = part.inputs["input_ids"][row].tolist(), part.labels[row].tolist()
    found, current = [], None
    for token, label in zip(ids, labels, strict=True):
        if label >= 0:
            current = [bytes([token - 3]), corpus.classes[label]]
            found.append(current)
        elif label == CONTINUED:
            current[0] += bytes([token - 3])
    return [(word.decode(), tag) for word, tag in found]


# CoNLL ----------------------------------------------------------------------------------------------------

CONLL = """-DOCSTART- 17\tO

Chest\tB-problem
pain\tI-problem
.\tO

An\tO
ECG\tB-test
-DOCSTART- 18\tO

Aspirin\tI-treatment
"""


def test_conll(tmp_path, caplog):
    (tmp_path / "x-train.conll").write_text(CONLL)
    (tmp_path / "x-test.conll").write_text("No\tO\nfever\tB-problem\n")
    (tmp_path / "x-dev.conll").write_text("ignored\tO\n")
    with caplog.at_level(logging.INFO):
        corpus = load(spec("conll", tmp_path))
    assert "neither train nor test: x-dev.conll" in caplog.text
    assert corpus.task == "tokens" and corpus.classes == (
        *("O", "B-problem", "I-problem", "B-test", "I-test", "B-treatment", "I-treatment"),
    )
    assert words_of(corpus, 0) == [("Chest", "B-problem"), ("pain", "I-problem"), (".", "O")]
    assert words_of(corpus, 2) == [("Aspirin", "B-treatment")]  # an entity begins with B
    assert words_of(corpus, 0, "test") == [("No", "O"), ("fever", "B-problem")]
    assert corpus.columns["document"].tolist() == ["17", "17", "18"]
    assert corpus.units.tolist() == [0, 0, 1]
    # Document 17 has a problem and a test: the first by name; document 18 a treatment.
    assert [corpus.stratum_names[number] for number in corpus.strata] == ["problem", "problem", "treatment"]


@pytest.mark.parametrize("ending", ["tsv", "txt", "bio"])
def test_a_folder_without_conll_files_is_read_by_another_ending(tmp_path, ending):
    (tmp_path / f"train.{ending}").write_text("chest\tB-problem\npain\tI-problem\n\nno\tO\n")
    (tmp_path / f"test.{ending}").write_text("fever\tB-problem\n")
    found = prepare(spec("conll", tmp_path))
    assert found.train.content == [["chest", "pain"], ["no"]] and found.test.content == [["fever"]]


def test_a_folder_without_tagged_files_says_which_it_could_have(tmp_path):
    with pytest.raises(UserError, match=r"No \*.conll file found in .*, or \*.iob, .* or \*.txt"):
        prepare(spec("conll", tmp_path))


def test_a_conll_line_without_a_tag_is_named(tmp_path):
    (tmp_path / "train.conll").write_text("fine\tO\nbroken\n")
    with pytest.raises(UserError, match=r"Line 2 of .*train.conll is no word with a BIO tag"):
        load(spec("conll", tmp_path))


def test_tags_by_word_with_a_real_subword_tokenizer(tmp_path):
    tokenizer = word_tokenizer()
    (tmp_path / "train.conll").write_text("chest\tB-problem\npain\tI-problem\n\nnew\tO\n")
    corpus = load(spec("conll", tmp_path, test_fraction=0.5), tokenizer)
    row = torch.cat([corpus.train.labels, corpus.test.labels]).tolist()
    assert [IGNORED, 1, 2, IGNORED] in row  # [CLS] chest pain [SEP]


def test_words_beyond_the_cut_are_counted(tmp_path, caplog):
    (tmp_path / "train.conll").write_text("a\tO\nlong\tB-problem\nfever\tI-problem\n\nb\tB-test\n")
    corpus = load(spec("conll", tmp_path, max_tokens=4, test_fraction=0.0))
    assert (
        "1 words of entities lie beyond dataset.max_tokens=4" in caplog.text
    )  # "a", space, "l" and the end; "fever" is lost
    assert corpus.train.inputs["input_ids"].shape == (2, 4)


def test_conll_2003_marks_and_a_byte_order_mark(tmp_path):
    """-X- stands for no name in CoNLL-2003. Windows puts a mark before the first line."""
    text = "-DOCSTART- -X- -X- O\r\n\r\nfever\tB-problem\r\n\r\n" * 3
    (tmp_path / "a.conll").write_bytes(b"\xef\xbb\xbf" + text.encode())
    corpus = load(spec("conll", tmp_path, test_fraction=0.0))
    assert corpus.columns["document"].tolist() == ["a/1", "a/2", "a/3"]
    assert [words_of(corpus, row) for row in range(3)] == [[("fever", "B-problem")]] * 3


def test_files_of_one_name_in_two_folders_are_two_documents(tmp_path):
    for site in ("north", "south"):
        (tmp_path / site).mkdir()
        (tmp_path / site / "1.conll").write_text("fever\tB-problem\n")
        (tmp_path / site / "1.txt").write_text("fever")
        (tmp_path / site / "1.ann").write_text("T1\tproblem 0 5\tfever\n")
    for kind, more in {"conll": {"unmarked": "files"}, "brat": {}}.items():
        corpus = load(spec(kind, tmp_path, test_fraction=0.0, **more))
        assert corpus.columns["document"].tolist() == ["north/1", "south/1"], kind


def test_odd_spaces_and_line_ends_within_a_word_stay_there(tmp_path):
    (tmp_path / "a.conll").write_text("5\xa0mg\tB-dose\nof\x85it\tO\n\nno\tB-test\n")
    corpus = load(spec("conll", tmp_path, test_fraction=0.0))
    assert words_of(corpus, 0) == [("5\xa0mg", "B-dose"), ("of\x85it", "O")]


def test_one_document_cannot_give_test_rows(tmp_path):
    (tmp_path / "a.conll").write_text("fever\tB-problem\n\ncough\tB-problem\n")
    words = ["dataset=conll", f"dataset.path={tmp_path}", "model=bert_tiny", "dataset.unmarked=files"]
    config = read(resolved(compose_config(words)))
    with pytest.raises(UserError, match=r"no test rows.*documents"):
        load_corpus(config)
    # A site is judged by the server's test rows, not by its own.
    assert len(load_corpus(config, str(tmp_path), ("O", "B-problem", "I-problem")).train) == 2


def test_documents_that_are_dealt_out_are_not_called_examples(tmp_path):
    sentence = "pain B-problem\nnow O\n\n"
    documents = [f"-DOCSTART- {n} O\n\n{sentence * 3}" for n in range(20)]
    (tmp_path / "notes.conll").write_text("".join(documents))
    words = ["dataset=conll", f"dataset.path={tmp_path}", "model=bert_tiny", "partition=iid"]
    config = read(resolved(compose_config([*words, "dataset.validation=0"])))
    shares = share_out(load_corpus(config), config, 4)
    assert shares.partition.note == "IID: 4 clients with 4 documents or patients (12 examples)."


def test_sentences_are_units_where_no_document_is_marked(tmp_path, caplog):
    sentence = "the\tO\nfever\tB-problem\n\n"
    (tmp_path / "train.conll").write_text(sentence * 600)
    with caplog.at_level(logging.INFO):
        corpus = load(spec("conll", tmp_path))
    assert len(np.unique(corpus.units)) == len(corpus.train) == 480 and len(corpus.test) == 120
    assert "no -DOCSTART-, so that each of 600 sentences is a unit of its own" in caplog.text
    (tmp_path / "test.conll").write_text(f"-DOCSTART- 7 O\n\n{sentence * 3}")  # this one has marks
    assert load(spec("conll", tmp_path)).test_columns["document"].tolist() == ["7"] * 3


def test_epsilon_per_document_keeps_an_unmarked_file_together(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.conll").write_text("the\tO\nfever\tB-problem\n\n" * 4)
    words = ["dataset=conll", f"dataset.path={tmp_path}", "privacy=dp_sgd", "strategy=fedavg"]
    for unit, units in ("document", 3), ("example", 12):
        corpus = load_corpus(read(resolved(compose_config([*words, f"privacy.unit={unit}"]))))
        assert len(np.unique([*corpus.columns["document"], *corpus.test_columns["document"]])) == units


# i2b2 2010 ------------------------------------------------------------------------------------------------


def i2b2(root, institution, name, text, concepts):
    for folder, suffix, content in (("txt", "txt", text), ("concept", "con", concepts)):
        path = root / institution / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / f"{name}.{suffix}").write_text(content)


def test_i2b2(tmp_path, caplog):
    text = "Admission Date :\nHe had chest pain and an ECG .\n"
    concepts = (
        'c="chest pain" 2:2 2:3||t="problem"\nc="an ecg" 2:5 2:6||t="test"\nc="pain" 2:3 2:3||t="problem"\n'
    )
    i2b2(tmp_path, "beth", "record-1", text, concepts)
    i2b2(tmp_path, "partners", "0042", "Started aspirin .\n", 'c="aspirin" 1:1 1:1||t="treatment"\n')
    with caplog.at_level(logging.INFO):
        corpus = load(spec("i2b2", tmp_path, test_fraction=0.0))
    assert "1 concepts overlap longer ones" in caplog.text
    rows = {words[0][0]: words for words in (words_of(corpus, row) for row in range(3))}
    assert rows["He"] == [
        *(("He", "O"), ("had", "O"), ("chest", "B-problem"), ("pain", "I-problem"), ("and", "O")),
        *(("an", "B-test"), ("ECG", "I-test"), (".", "O")),
    ]
    assert sorted(set(corpus.columns["source"])) == ["beth", "partners"]
    assert sorted(set(corpus.columns["document"])) == ["beth/record-1", "partners/0042"]


def test_i2b2_names_that_two_institutions_share(tmp_path):
    """Each text has its own concepts, not those of the other's file of that name."""
    text = "Fever and chest pain .\n"
    i2b2(tmp_path, "beth", "1", text, 'c="fever" 1:0 1:0||t="problem"\n')
    i2b2(tmp_path, "partners", "1", text, 'c="chest pain" 1:2 1:3||t="test"\n')
    corpus = load(spec("i2b2", tmp_path, test_fraction=0.0))
    assert words_of(corpus, 0)[0] == ("Fever", "B-problem") and words_of(corpus, 1)[2] == ("chest", "B-test")
    assert corpus.columns["document"].tolist() == ["beth/1", "partners/1"]


def test_i2b2_texts_and_concepts_in_folders_apart(tmp_path):
    """As the corpus gives its test data out."""
    for folder, name, content in (
        ("test_data", "0001.txt", "Fever .\n"),
        ("reference_standard_for_test_data/concepts", "0001.con", 'c="fever" 1:0 1:0||t="problem"\n'),
        ("beth/unannotated", "0001.txt", "Seen by Dr. Who .\n"),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_text(content)
    with pytest.raises(UserError, match=r"concepts.0001.con may belong to .*0001.txt or .*0001.txt: keep"):
        load(spec("i2b2", tmp_path, test_split="none", test_fraction=0.0))
    (tmp_path / "beth/unannotated/0001.txt").rename(tmp_path / "beth/unannotated/0002.txt")
    corpus = load(spec("i2b2", tmp_path, test_split="none", test_fraction=0.0))
    assert words_of(corpus, 0) == [("Fever", "B-problem"), (".", "O")]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ('c="chest" 1:0 1:0||t="problem"', "names words that its text does not have"),
        ('c="started" 9:0 9:0||t="problem"', "names words that its text does not have"),
        ("started 1:0", "is no concept"),
    ],
)
def test_a_concept_that_does_not_fit_is_named(tmp_path, line, match):
    i2b2(tmp_path, "beth", "a", "Started aspirin .\n", line + "\n")
    with pytest.raises(UserError, match=match):
        load(spec("i2b2", tmp_path))


def test_a_page_break_ends_no_line(tmp_path):
    text, concept = "Seen today\x0cPage 2\nNo cough\n", 'c="cough" 2:1 2:1||t="problem"\n'
    i2b2(tmp_path, "beth", "a", text, "\ufeff" + concept)
    corpus = load(spec("i2b2", tmp_path, test_fraction=0.0))
    assert words_of(corpus, 1) == [("No", "O"), ("cough", "B-problem")]


# brat -----------------------------------------------------------------------------------------------------


def brat(folder, text, annotations):
    (folder / "case.txt").write_bytes(text.encode())
    (folder / "case.ann").write_bytes(annotations.encode())
    return load(spec("brat", folder, test_fraction=0.0))


def test_an_entity_across_sentences_is_left_out_whole(tmp_path, caplog):
    """Not left out in the first sentence and tagged in the second, as an entity nobody annotated."""
    with caplog.at_level(logging.INFO):
        corpus = brat(
            tmp_path, "No chest\npain or rash", "T1\tproblem 3 13\tchest pain\nT2\tsign 17 21\trash\n"
        )
    assert "1 entities in pieces, overlapping others or across" in caplog.text
    assert words_of(corpus, 1) == [("pain", "O"), ("or", "O"), ("rash", "B-sign")]


@pytest.mark.parametrize("place", [10, 8])  # \\r\\n counted as two characters, and as one
def test_windows_line_ends_do_not_shift_entities(tmp_path, place):
    annotations = f"\ufeffT1\tproblem {place} {place + 4}\trash\r\n"
    corpus = brat(tmp_path, "Seen\r\nTo\r\nrash noted", annotations)
    assert words_of(corpus, 2) == [("rash", "B-problem"), ("noted", "O")]


def test_a_span_that_covers_other_words_is_named(tmp_path):
    with pytest.raises(UserError, match=r"Line 1 of .*case.ann .* 'ras'"):
        brat(tmp_path, "A rash", "T1\tproblem 2 5\trash\n")


@pytest.mark.parametrize("kind", ["brat", "i2b2", "conll"])
def test_texts_in_another_encoding_are_named(tmp_path, kind):
    (tmp_path / "a.txt").write_bytes("fièvre".encode("latin-1"))
    (tmp_path / "a.ann").write_text("")
    (tmp_path / "a.con").write_text("")
    (tmp_path / "a.conll").write_bytes("fièvre O".encode("latin-1"))
    with pytest.raises(UserError, match=r"a\.(txt|conll) cannot be read as UTF-8"):
        load(spec(kind, tmp_path))


def test_brat(tmp_path, caplog):
    text = "Severe chest pain. Given aspirin 81 mg.\nNo rash"
    annotations = (
        "T1\tproblem 7 17\tchest pain\n"
        "T2\ttreatment 25 32\taspirin\n"
        "T3\tproblem 0 6;12 16\tSevere pain\n"
        "R1\ttreats Arg1:T2 Arg2:T1\n"
    )
    (tmp_path / "case.txt").write_text(text)
    (tmp_path / "case.ann").write_text(annotations)
    with caplog.at_level(logging.INFO):
        corpus = load(spec("brat", tmp_path, test_fraction=0.0))
    assert "1 entities in pieces" in caplog.text
    assert words_of(corpus, 0) == [
        *(("Severe", "O"), ("chest", "B-problem"), ("pain", "I-problem"), (".", "O")),
    ]
    assert words_of(corpus, 1)[:2] == [("Given", "O"), ("aspirin", "B-treatment")]
    assert words_of(corpus, 2) == [("No", "O"), ("rash", "O")]
    (tmp_path / "case.ann").write_text("T1\tproblem 7 999\tx\n")
    with pytest.raises(UserError, match="names characters its text does not have"):
        load(spec("brat", tmp_path))


# MIMIC-III ------------------------------------------------------------------------------------------------


def mimic(folder, notes, codes, zipped=False):
    head = '"ROW_ID","SUBJECT_ID","HADM_ID","CHARTDATE","CATEGORY","DESCRIPTION","ISERROR","TEXT"\n'
    lines = [f'{n},{s},{h},2101-01-01,"{c}","Report","{e}","{t}"' for n, (s, h, c, e, t) in enumerate(notes)]
    diagnoses = ['"ROW_ID","SUBJECT_ID","HADM_ID","SEQ_NUM","ICD9_CODE"']
    diagnoses += [f'{n},{s},{h},{q},"{c}"' for n, (s, h, q, c) in enumerate(codes)]
    for name, text in (("NOTEEVENTS", head + "\n".join(lines)), ("DIAGNOSES_ICD", "\n".join(diagnoses))):
        if zipped:
            (folder / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / f"{name}.csv").write_text(text)


DISCHARGE = "Discharge summary"


@pytest.mark.parametrize("zipped", [False, True])
def test_mimic(tmp_path, zipped):
    notes = [
        (1, 100, DISCHARGE, "", "first\nnote"),
        (1, 100, DISCHARGE, "", "addendum"),
        (1, 101, DISCHARGE, "", "second stay"),
        (2, 200, "Radiology", "", "not read"),
        (2, 200, DISCHARGE, "1", "an error"),
        (2, 201, DISCHARGE, "", "third"),
        (3, "", DISCHARGE, "", "no admission"),
    ]
    codes = [
        *((1, 100, 2, "4019"), (1, 100, 1, "42731"), (1, 100, 3, "4019")),
        *((1, 101, 1, "42731"), (2, 201, 1, "V5867"), (2, 201, 2, "4019"), (2, 201, 3, "")),
    ]
    mimic(tmp_path, notes, codes, zipped)
    corpus = load(spec("mimic", tmp_path, test_fraction=0.0, top_labels=2))
    assert corpus.task == "multilabel" and corpus.classes == ("4019", "42731")  # by frequency, then name
    texts = [bytes(int(i) - 3 for i in row if i > 2).decode() for row in corpus.train.inputs["input_ids"]]
    assert texts == ["first\nnote\naddendum", "second stay", "third"]
    assert corpus.train.labels.tolist() == [[1, 1], [0, 1], [1, 0]]
    assert [corpus.classes[number] for number in corpus.strata] == ["42731", "42731", "4019"]  # by patient
    assert corpus.columns["patient"].tolist() == ["1", "1", "2"] and corpus.units.tolist() == [0, 0, 1]


def test_mimic_as_pandas_saves_it_again(tmp_path):
    """A column with gaps comes back as 100.0 and 1.0, and then nothing matches and no error is an error."""
    notes = [
        *((1, "100.0", DISCHARGE, "", "first"), (1, "100.0", DISCHARGE, "1.0", "an error")),
        (2, "200.0", DISCHARGE, "0.0", "second"),
    ]
    mimic(tmp_path, notes, [(1, 100, 1, "4019"), (2, 200, 1, "42731")])
    corpus = load(spec("mimic", tmp_path, test_fraction=0.0))
    texts = [bytes(int(i) - 3 for i in row if i > 2).decode() for row in corpus.train.inputs["input_ids"]]
    assert texts == ["first", "second"] and corpus.columns["document"].tolist() == ["100", "200"]


def test_mimic_keeps_patients_apart(tmp_path):
    rng = np.random.default_rng(0)
    notes, codes = [], []
    for admission in range(200):
        patient = int(rng.integers(60))
        notes.append((patient, admission, DISCHARGE, "", f"text {admission} of patient {patient}"))
        codes += [(patient, admission, seq, f"c{rng.integers(4)}") for seq in (1, 2)]
    mimic(tmp_path, notes, codes)
    words = [
        "dataset=mimic",
        f"dataset.path={tmp_path}",
        "model=bert_tiny",
        "num_clients=4",
        "partition.min_size=3",
    ]
    words += ["partition.alpha=0.5", "dataset.client_validation=0.2", "dataset.tokenizer=own"]  # bytes
    config = read(resolved(compose_config(words)))
    corpus = load_corpus(config)

    def patients(table):
        texts = [bytes(int(i) - 3 for i in row if i > 2).decode() for row in table.inputs["input_ids"]]
        return {text.split()[-1] for text in texts}

    shares = share_out(corpus, config, 4)
    parts = [shares.validation, *shares.partition.indices]
    for rows, client in zip(parts[1:], "0123", strict=True):
        own = client_rows(rows, corpus, config, client)
        assert len(own.validation) and not patients(corpus.train.take(own.train)) & patients(
            corpus.train.take(own.validation)
        )
    groups = [patients(corpus.test), *(patients(corpus.train.take(rows)) for rows in parts)]
    assert sum(map(len, groups)) == len(set.union(*groups))
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(corpus.train)))
    with pytest.raises(UserError, match=r"has no DIAGNOSES_ICD.csv"):
        (tmp_path / "DIAGNOSES_ICD.csv").unlink()
        load_corpus(config)


# Several labels in tables ---------------------------------------------------------------------------------


def test_several_labels_a_row(tmp_path):
    (tmp_path / "a.csv").write_text("text,label,who\nfever,b;a,1\ncough,a,1\nrash,,2\npain,c; b,3\n")
    corpus = load(spec("text", tmp_path / "a.csv", task="multilabel", test_fraction=0.0, unit_column="who"))
    assert corpus.classes == ("a", "b", "c")
    assert corpus.train.labels.tolist() == [[1, 1, 0], [1, 0, 0], [0, 1, 1]]
    assert corpus.units.tolist() == [0, 0, 1]
    lines = '{"text": "fever", "labels": ["x", "y"]}\n{"text": "cough", "labels": ["y"]}\n'
    (tmp_path / "b.jsonl").write_text(lines)
    assert load(spec("text", tmp_path / "b.jsonl", task="multilabel", test_fraction=0.0)).classes == (
        "x",
        "y",
    )
    with pytest.raises(UserError, match=r"or dataset\.task=multilabel"):
        load(spec("text", tmp_path / "b.jsonl"))
    with pytest.raises(UserError, match="does not fit data of kind text"):
        load(spec("text", tmp_path / "b.jsonl", task="entities"))
    with pytest.raises(UserError, match="unit_column='ward' is not a column"):
        load(spec("text", tmp_path / "a.csv", unit_column="ward"))


# Synthetic ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_synthetic_notes_in_three_readings():
    tokenizer = word_tokenizer()
    one, several, tagged = (
        load(DatasetSpec(kind="synthetic", task=task), tokenizer)
        for task in ("classification", "multilabel", "entities")
    )
    assert len(one.classes) == 6 and tokenizer.unk_token_id not in one.train.inputs["input_ids"]
    assert torch.equal(
        one.train.inputs["input_ids"],
        load(DatasetSpec(kind="synthetic"), tokenizer).train.inputs["input_ids"],
    )
    # The presenting problem's specialty is one of the patient's.
    assert several.train.labels.sum(dim=1).max() == 2
    assert (
        several.train.labels[torch.arange(len(several.train)), torch.from_numpy(several.strata)]
        .float()
        .mean()
        > 0.8
    )
    assert {name[2:] for name in tagged.classes[1:]} == {"problem", "test", "treatment"}
    assert len(np.unique(one.columns["hospital"])) == 8


def test_rows_that_name_no_unit_are_units_of_their_own():
    rows = Rows(["x"] * 6, ["a"] * 6, {"patient": ["p", "", "", "p", None, None]}, [""] * 6)
    assert unit_numbers(rows, "patient").tolist() == [0, 1, 2, 0, 3, 4]


def test_iob2_and_spans():
    assert iob2(["I-a", "I-a", "O", "I-b", "I-a"]) == ["B-a", "I-a", "O", "B-b", "B-a"]
    assert tag_spans(4, [(0, 0, "x"), (0, 2, "y")]) == (["B-y", "I-y", "I-y", "O"], 1)


def test_auto_tokenizer_is_a_fast_one(tmp_path):
    word_tokenizer().save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).is_fast


def test_texts_begin_where_they_are_whatever_is_beside_them(tmp_path):
    """Many decoders' tokenizers pad on the left, where one long text would move all others' positions."""
    tokenizer = word_tokenizer()
    tokenizer.padding_side = "left"
    (tmp_path / "notes.csv").write_text(
        "text,label\ncough,a\nfever,b\ncough and fever and cough,a\nfever,b\n"
    )
    corpus = load(spec("text", tmp_path, test_fraction=0.0), tokenizer)
    masks = corpus.train.inputs["attention_mask"]
    assert masks.sum(dim=1).unique().numel() > 1
    assert masks[:, 0].all() and (masks.diff(dim=1) <= 0).all()
