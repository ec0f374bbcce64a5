"""How texts become tokens: learned from the server's own rows, long enough, cut with a word, or in chunks."""

import json
import logging

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.config import compose_run
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.vocabulary import Vocabulary, problem_of_merges
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.data.subwords import learn, piece_names, read_pieces, tokenizer_json, tokenizer_of_pieces
from fedfrozen_app.data.text_reading import reading_of_spec
from fedfrozen_app.exchange.proposal import propose, read_proposal
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.launch import load_run
from fedfrozen_app.local.worker import Worker, make_data_spec
from fedfrozen_app.models.chunks import chunks_apart, chunks_together
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.views import View

WORDS = ("fever", "cough", "fracture", "aspirin", "lesion", "suture", "biopsy", "anaemia")


def write(path, lengths=(12,) * 90, *, extra=""):
    """Notes of two classes, by their words."""
    rng = np.random.default_rng(0)
    lines = ["text,label"]
    for number, length in enumerate(lengths):
        own = WORDS[:4] if number % 2 else WORDS[4:]
        lines.append(f"{' '.join(rng.choice(own, length))} {extra},{number % 2}")
    path.write_text("\n".join(lines) + "\n")
    return path


def words(path, *more):
    return [
        "dataset=text",
        f"dataset.path={path}",
        "strategy=fedavg",
        "model=bert_tiny",
        "partition=iid",
        *more,
    ]


def corpus_of(path, *more):
    return load_corpus(compose_run(words(path, *more)).config)


# The vocabulary ---------------------------------------------------------------------------------------------


def test_learned_pieces_are_numbers_that_make_the_same_tokenizer_everywhere(tmp_path):
    texts = ["Fever and cough.", "fever, no cough", "a coughing fit", "Fieber ohne Husten – naïve"] * 3
    found = learn(texts, 300, lowercase=True)
    assert found == learn(texts, 300, lowercase=True) and found.size <= 300
    assert "Ġfever" in piece_names(found) and problem_of_merges(found.merges) is None
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(found))
    assert read_pieces(tmp_path / "tokenizer.json") == found
    plain = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    sentence = "Fever – naïve 😀"
    ids = tokenizer_of_pieces(found)(sentence)["input_ids"]
    assert plain(sentence)["input_ids"] == ids and max(ids) < found.size
    assert plain.decode(ids, skip_special_tokens=True).strip() == sentence.lower()  # nothing is unknown


@pytest.mark.parametrize("merges", [(4,), (4, 260), (4, 5, 4, 5), (0, 5), (4, 5, 261, 4)])
def test_numbers_that_are_no_vocabulary_are_refused(merges):
    assert problem_of_merges(merges)
    spec = {"max_tokens": 8, "chunks": 1, **Vocabulary(merges, True).spec()}
    with pytest.raises(UserError, match="damaged"):
        reading_of_spec(spec)


def test_no_client_text_reaches_the_vocabulary_or_the_length(tmp_path):
    path = write(tmp_path / "notes.csv")
    first = corpus_of(path)
    own = set(share_out(first, compose_run(words(path)).config, 3).validation.tolist())
    lines = path.read_text().splitlines()
    kept = {tuple(row.tolist()) for row in first.train.inputs["input_ids"][sorted(own)]}
    tokenizer = tokenizer_of_pieces(first.reading.vocabulary)
    changed = [lines[0]]
    for line in lines[1:]:
        text, label = line.rsplit(",", 1)
        ids = tokenizer(text, truncation=True, max_length=first.reading.max_tokens, padding="max_length")
        mine = tuple(ids["input_ids"][: first.train.inputs["input_ids"].shape[1]]) in kept
        changed.append(line if mine else f"{'zebrafish ' * 40},{label}")
    path.write_text("\n".join(changed) + "\n")
    second = corpus_of(path)
    assert second.reading == first.reading
    assert not any("zebra" in name for name in piece_names(second.reading.vocabulary))
    assert second.account["texts"]["splits"]["train"]["cut"] > 40  # and that is said


# Length -----------------------------------------------------------------------------------------------------


def test_the_length_fits_the_texts_and_the_share_that_is_cut_is_said(tmp_path, caplog):
    path = write(tmp_path / "notes.csv", [10] * 133 + [60] * 2)
    with caplog.at_level(logging.INFO):
        corpus = corpus_of(path, "dataset.validation=0.5")
    assert 12 <= corpus.reading.max_tokens <= 40 and corpus.reading.max_tokens % 8 == 0
    counts = corpus.account["texts"]["splits"]
    assert sum(part["cut"] for part in counts.values()) == 2
    assert "2 of 135 texts (1.5 %) are cut at" in caplog.text
    long = write(tmp_path / "long.csv", [700] * 60)
    assert corpus_of(long).reading.max_tokens == 512
    assert corpus_of(long, "dataset.max_tokens=600").reading.max_tokens == 600


def test_texts_are_read_as_before_where_nothing_is_learned(tmp_path, caplog):
    path = write(tmp_path / "notes.csv")
    own = corpus_of(path, "dataset.tokenizer=own", "dataset.max_tokens=128")
    assert own.vocab_size == 384 and own.reading.vocabulary is None
    with caplog.at_level(logging.INFO):
        nothing = corpus_of(path, "dataset.validation=0")
    assert nothing.reading.vocabulary is None and nothing.reading.max_tokens == 128
    assert "no text of its own to learn a tokenizer from" in caplog.text
    with pytest.raises(UserError, match=r"needs text that is the server's own"):
        corpus_of(path, "dataset.validation=0", "dataset.tokenizer=learned")
    (tmp_path / "public.txt").write_text("fever\ncough\n" * 9)
    public = ["dataset.validation=0", f"dataset.tokenizer_text={tmp_path}/public.txt"]
    assert "Ġfever" in piece_names(corpus_of(path, *public).reading.vocabulary)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["dataset.tokenizer=words"], "dataset.tokenizer=words is no file"),
        (["+model.config.vocab_size=100"], "vocab_size=100 has no place for the 256 bytes"),
        (["dataset.tokenizer_text=nowhere"], "dataset.tokenizer_text=nowhere does not exist"),
        (["dataset.max_chunks=3"], "dataset.long_texts=cut ignores dataset.max_chunks"),
        (["dataset.long_texts=chunks", "privacy=dp_sgd"], "several gradients a text"),
        (["dataset.tokenizer=own", "dataset.vocab_size=500"], "ignores dataset.vocab_size"),
    ],
)
def test_bad_settings_get_a_sentence(tmp_path, more, sentence):
    with pytest.raises(UserError, match=sentence):
        corpus_of(write(tmp_path / "notes.csv"), *more)


# Clients ----------------------------------------------------------------------------------------------------


def test_a_client_reads_as_the_server_says_and_checks_the_digest(tmp_path):
    path = write(tmp_path / "notes.csv")
    config = compose_run(words(path)).config
    server = load_corpus(config)
    spec = json.loads(json.dumps(make_data_spec(server, config)["text"]))
    client = load_corpus(config, str(path), server.classes, reading=reading_of_spec(spec))
    assert torch.equal(client.train.inputs["input_ids"], server.train.inputs["input_ids"])
    spec["merges"][-1] -= 1
    with pytest.raises(UserError, match="its digest is another"):
        reading_of_spec(spec)
    # An older server says nothing: bytes, at most 128.
    older = load_corpus(config, str(path), server.classes)
    assert older.reading.vocabulary is None and older.train.inputs["input_ids"].shape[1] <= 128


def test_a_proposal_carries_the_tokenizer_and_a_policy_judges_it(tmp_path):
    path = write(tmp_path / "notes.csv")
    config = compose_run(words(path, "dataset.max_tokens=64")).config
    data_spec = make_data_spec(load_corpus(config), config)
    proposal = propose(config, data_spec, "run", ["head"])
    assert read_proposal(proposal.text).data_spec["text"] == data_spec["text"]
    broken = proposal.plain | {"texts": proposal.plain["texts"] | {"merges": [4, 999]}}
    with pytest.raises(ValueError, match="merge 0 joins a token that is not there"):
        read_proposal(canonical(json.loads(json.dumps(broken))))
    view = View("notes", "text", classes=("0", "1"))
    open_policy = {
        "strategies": ("fedavg",),
        "upload_roles": ("head",),
        "min_examples": 1,
        "max_epsilon": 9.0,
    }
    open_policy |= {"rounds_per_day": 9, "bundles": "any", "privacy_required": False}

    def problem(view=view, **more):
        return Policy(**open_policy, **more).problem_of_proposal(proposal, view, "x")

    assert problem() is None
    assert "tokenizers: own" in problem(tokenizers="own")
    assert "reads 64 tokens of a text, and it 32" in problem(max_tokens=32)
    other = View("notes", "text", classes=("0", "1"), max_tokens=128)
    assert "the view notes 128" in problem(other)
    plain = compose_run(words(path, "dataset.tokenizer=own", "dataset.max_tokens=128")).config
    assert "texts" not in propose(plain, make_data_spec(load_corpus(plain), plain), "run", ["head"]).plain


# Chunks -----------------------------------------------------------------------------------------------------


def test_chunks_hold_the_whole_text_and_their_mean_by_hand(tmp_path):
    path = write(tmp_path / "notes.csv", [6, 40] * 45)
    corpus = corpus_of(path, "dataset.long_texts=chunks", "dataset.max_tokens=16")
    inputs = corpus.train.inputs
    assert inputs["input_ids"].ndim == 3 and inputs["input_ids"].shape[1] == corpus.reading.chunks >= 3
    used = (inputs["attention_mask"].sum(-1) > 1).sum(1)
    assert used.min() == 1 and used.max() >= 3
    mask = torch.tensor([[[1, 1], [1, 1], [1, 0]], [[1, 1], [1, 0], [1, 0]], [[1, 0], [1, 0], [1, 0]]])
    logits = torch.arange(18, dtype=torch.float64).reshape(9, 2)
    given = {"input_ids": torch.zeros(3, 3, 2), "attention_mask": mask}
    assert chunks_apart(given)["attention_mask"].shape == (9, 2)
    expected = torch.tensor([[1.0, 2.0], [6.0, 7.0], [12.0, 13.0]], dtype=torch.float64)
    assert torch.equal(chunks_together(logits, given), expected)


def test_both_runners_agree_on_chunks(train, tmp_path):
    path = write(tmp_path / "notes.csv", [6, 30] * 45)
    more = words(
        path, "dataset.long_texts=chunks", "dataset.max_tokens=12", "model.dtype=float64", "num_rounds=1"
    )
    one = train(*more, folder="one")
    stacked = train(*more, "runtime.runner=cohort", folder="two").model
    for name, value in one.model.items():
        assert torch.allclose(value, stacked[name], rtol=0, atol=1e-9), name


# Runs -------------------------------------------------------------------------------------------------------


def test_a_run_keeps_its_tokenizer_for_whoever_uses_its_model(train, tmp_path):
    path = write(tmp_path / "notes.csv")
    run = train(*words(path, "num_rounds=1"))
    dataset = run.summary["config"]["dataset"]
    assert (dataset["tokenizer"], dataset["max_tokens"]) == ("learned", 40) or dataset["max_tokens"] % 8 == 0
    learned = read_pieces(run.folder / "tokenizer.json")
    assert (
        json.loads((run.folder / "data.json").read_text())["texts"]["tokenizer"]["sha256"] == learned.digest
    )
    other = write(tmp_path / "other.csv", [5] * 60, extra="entirely different wording")
    worker = load_run(run.folder, [f"dataset.path={other}"])
    assert worker.corpus.reading.vocabulary == learned
    assert worker.corpus.reading.max_tokens == dataset["max_tokens"]
    (run.folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing: .* --repair sets it aside"):
        load_run(run.folder, [])
    assert command(["verify", str(run.folder), "--repair"]) == 0
    with pytest.raises(UserError, match="not the one that the stored model was trained with"):
        load_run(run.folder, [f"dataset.path={other}"])
    assert isinstance(load_run(run.folder, []), Worker)  # its own data give the same again
