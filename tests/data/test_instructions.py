"""Prompts and answers as rows for a language model: columns, tokens, what counts, and bad files."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.federated import load_corpus
from fedfrozen_app.data.sources import DatasetSpec, load
from fedfrozen_app.data.table import IGNORED

BYTES = 3  # ByT5's numbers begin with padding, end and unknown
END = 1


def spec(path, **options):
    return DatasetSpec(name="x", kind="instructions", path=str(path), test_fraction=0.25, **options)


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(count=4, **more):
    return [{"prompt": f"q{n}", "answer": f"yes {n}", **more} for n in range(count)]


def of_bytes(text):
    return [byte + BYTES for byte in text.encode()]


def kept(table, row):
    return table.inputs["input_ids"][row][table.inputs["attention_mask"][row].bool()].tolist()


def test_a_row_is_prompt_answer_and_end_and_the_answer_alone_counts(tmp_path):
    corpus = load(spec(write(tmp_path / "a.jsonl", *rows())))
    assert (corpus.task, corpus.classes) == ("language", ())
    assert len(corpus.train) == 3 and len(corpus.test) == 1
    found = kept(corpus.test, 0)
    prompt, answer = found[:3], found[3:]
    assert prompt[0] == of_bytes("q")[0] and prompt[2] == of_bytes("\n")[0]
    assert answer[:4] == of_bytes("yes ") and answer[-1] == END
    labels = corpus.test.labels[0]
    assert labels[:3].tolist() == [IGNORED] * 3 and labels[3 : len(found)].tolist() == answer
    assert (labels[len(found) :] == IGNORED).all()


def test_a_prompt_s_tokens_count_where_that_is_asked_for_but_for_the_first(tmp_path):
    corpus = load(spec(write(tmp_path / "a.jsonl", *rows()), prompt_loss=True))
    labels, found = corpus.test.labels[0], kept(corpus.test, 0)
    assert int(labels[0]) == IGNORED and labels[1 : len(found)].tolist() == found[1:]


def test_plain_texts_count_whole_and_a_separator_of_one_s_own(tmp_path):
    plain = load(spec(write(tmp_path / "a.jsonl", *({"text": f"story {n}"} for n in range(4)))))
    assert int((plain.test.labels >= 0).sum()) == len(kept(plain.test, 0)) - 1
    parted = load(spec(write(tmp_path / "b.jsonl", *rows()), separator=" -> "))
    assert of_bytes(" -> ") == kept(parted.test, 0)[2:6]


def test_a_long_prompt_keeps_its_end_and_leaves_room_for_the_answer(tmp_path):
    long = [{"prompt": "a" * 30 + "b" * 8, "answer": "c" * 30} for _ in range(4)]
    corpus = load(spec(write(tmp_path / "a.jsonl", *long), max_tokens=16))
    found = kept(corpus.test, 0)
    assert found == of_bytes("b" * 7 + "\n" + "c" * 8)
    assert int((corpus.test.labels[0] >= 0).sum()) == 8
    short = [{"prompt": "a" * 30, "answer": "c"} for _ in range(4)]
    corpus = load(spec(write(tmp_path / "b.jsonl", *short), max_tokens=16))
    assert kept(corpus.test, 0) == [*of_bytes("a" * 13 + "\n" + "c"), END]


def test_a_real_tokenizer_gives_its_marks_and_its_end_counts_though_it_pads_too(tmp_path):
    words = {"<s>": 0, "</s>": 1, "[UNK]": 2, "who": 3, "me": 4, "you": 5}
    model = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<s>", eos_token="</s>", unk_token="[UNK]"
    )
    data = [{"question": "who", "response": "me you" if n else "me"} for n in range(4)]
    corpus = load(spec(write(tmp_path / "a.jsonl", *data)), tokenizer)
    assert corpus.pad_token_id == 1 and corpus.vocab_size == 6
    whole = torch.cat([corpus.train.labels, corpus.test.labels])
    ids = torch.cat([corpus.train.inputs["input_ids"], corpus.test.inputs["input_ids"]])
    (row,) = torch.nonzero((ids == 5).sum(dim=1) == 0).flatten().tolist()
    assert ids[row].tolist() == [0, 3, 4, 1, 1]  # the last is padding, and the one before is the text's end
    assert whole[row].tolist() == [IGNORED, IGNORED, 4, 1, IGNORED]


def test_rows_are_dealt_by_the_label_column_and_other_columns_stay(tmp_path):
    data = [{**row, "kind": "ab"[n % 2], "source": "x"} for n, row in enumerate(rows(8))]
    corpus = load(spec(write(tmp_path / "a.jsonl", *data), label_column="kind"))
    assert corpus.stratum_names == ("a", "b") and sorted(set(corpus.strata.tolist())) == [0, 1]
    assert set(corpus.columns) == {"kind", "source"}
    assert load(spec(write(tmp_path / "b.jsonl", *rows()))).stratum_names == ("text",)


def test_a_folder_with_splits_and_empty_answers_left_out(tmp_path, caplog):
    write(tmp_path / "train.jsonl", *rows(3), {"prompt": "q", "answer": "  "})
    write(tmp_path / "test.jsonl", *rows(2))
    corpus = load(spec(tmp_path))
    assert (len(corpus.train), len(corpus.test)) == (3, 2)
    assert "dropped 1 of 4 rows" in caplog.text


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer"\n', {}, "Line 2 of"),
        ('{"prompt": "a", "answer": "b"}\n\n["a"]\n', {}, "Line 3 of"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": ["b"]}\n', {}, "holds a list in line 2"),
        ('{"prompt": "a", "reply": "b"}\n', {}, "Set dataset.answer_column to the column to use"),
        ('{"prompt": "a", "answer": "b"}\n', {"prompt_column": "ask"}, "dataset.prompt_column='ask' is not"),
        ('{"prompt": "a", "answer": "b"}\n', {"label_column": "k"}, "dataset.label_column='k' is not"),
    ],
)
def test_a_bad_file_gets_one_sentence_with_its_line(tmp_path, text, options, sentence):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(UserError, match=sentence) as error:
        load(spec(tmp_path / "a.jsonl", **options))
    assert str(error.value).count("\n") == 0


def test_a_pretrained_language_model_without_its_tokenizer_is_refused(tmp_path):
    write(tmp_path / "a.jsonl", *rows())
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 32000}')
    words = ["dataset=instructions", f"dataset.path={tmp_path}/a.jsonl"]
    config = read(resolved(compose_config([*words, "model=checkpoint", f"model.path={folder}"])))
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_corpus(config)
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 384}')  # one over bytes
    assert load_corpus(config).vocab_size == 384
