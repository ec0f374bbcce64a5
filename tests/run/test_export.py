"""An export is used alone: plain transformers and peft give the run's own scores, with its labels."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    PreTrainedTokenizerFast,
)

from fedfrozen_app import commands
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.sources.synthetic import WORDS
from tests.conftest import named
from tests.run import plain_transformers
from tests.run.exported import QUICK, SIZES, case_of, colour_pictures
from tests.run.plain_transformers import check

DIGITS = ["dataset=digits", "dataset.limit=120", "model=vit_tiny", *SIZES]
NOTES = ["dataset=synthetic_clinical", "dataset.limit=120", *SIZES]
LLAMA = ["model=llama_tiny", "model.config.num_key_value_heads=1", *SIZES]
LORA = ["adapter=lora", "adapter.rank=2", "adapter.targets=all"]


def notes(folder):
    """Texts of one column, some of them longer than a model reads, with signs of many bytes."""
    rows = ["text,label"]
    for name, (problems, _, _) in WORDS.items():
        for day in range(20):
            rows.append(f"{problems[day % 5]} – day {day}; größer 𝄞 {'again ' * day},{name}")
    path = folder / "notes.csv"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def sentences(folder):
    path = folder / "train.conll"
    one = "The O\npatient O\nhas O\nsevere B-problem\nmigraine I-problem\n. O\n"
    other = "Start O\naspirin B-treatment\nnaïvely O\ntoday O\n"
    path.write_text("\n".join(["-DOCSTART- O\n", one, other] * 30), encoding="utf-8")
    return path


def questions(folder, prompts):
    rows = [{"prompt": f"What is {n}?", "answer": f"It is {n * n}."} for n in range(60)]
    rows = rows if prompts else [{"text": f"{one['prompt']} {one['answer']}"} for one in rows]
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def checkpoint(folder):
    """A BERT with a tokenizer of its own, trained on nothing."""
    problems = [one for found, _, _ in WORDS.values() for one in found]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokens = [*names, *dict.fromkeys(word for one in problems for word in one.split()), *"0123456789"]
    vocabulary = {name: number for number, name in enumerate(tokens)}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), names, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(vocabulary), num_labels=4, **sizes)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def words_of(name, place):
    """The settings of a run, whose files it writes to `place`."""
    place.mkdir(parents=True, exist_ok=True)
    what, _, after = name.partition(" ")
    if what == "lora":
        rule = ["adapter.rule=stack", "num_rounds=2"] if after == "stack" else []
        return [*words_of("picture" if after in ("", "stack") else after, place), *LORA, *rule]
    text = ["dataset=text", "dataset.max_tokens=48"]
    language = ["dataset=instructions", "dataset.max_tokens=40"]
    return {
        "picture": lambda: DIGITS,
        "colours": lambda: [
            *("dataset=images", f"dataset.path={colour_pictures(place / 'pictures')}"),
            *("dataset.image_size=16", "model=vit_tiny", "model.config.patch_size=4", *SIZES),
        ],
        "text": lambda: [*text, f"dataset.path={notes(place)}", "model=bert_tiny", *SIZES],
        "bytes": lambda: [*words_of("text", place), "dataset.tokenizer=own"],
        "chunks": lambda: [
            *words_of("text", place),
            *("dataset.max_tokens=8", "dataset.long_texts=chunks", "dataset.max_chunks=3"),
        ],
        "words": lambda: NOTES,
        "labels": lambda: [*NOTES, "dataset.task=multilabel"],
        "entities": lambda: [*NOTES, "dataset.task=entities"],
        "conll": lambda: ["dataset=conll", f"dataset.path={sentences(place)}", "model=bert_tiny", *SIZES],
        "language": lambda: [*language, f"dataset.path={questions(place, True)}", *LLAMA],
        "gpt2": lambda: [*language, f"dataset.path={questions(place, False)}", "model=gpt2_tiny"],
        "checkpoint": lambda: [
            *(*text, f"dataset.path={notes(place)}", "dataset.max_tokens=24"),
            *("model=checkpoint", f"model.path={checkpoint(place / 'bert')}"),
        ],
    }[name]()


NAMES = ("picture", "colours", "text", "words", "labels", "entities", "conll", "language", "gpt2")
NAMES += ("checkpoint", "bytes", "chunks")
ADAPTERS = ("lora", "lora stack", "lora language", "lora gpt2", "lora checkpoint")
CASES = {name: (name, ()) for name in NAMES + ADAPTERS} | {
    f"{name} merged": (name, ("--merge",)) for name in ADAPTERS
}


@pytest.mark.parametrize("case", named(CASES, "text", "lora"))
def test_plain_transformers_give_the_run_s_scores(train, tmp_path, case):
    name, flags = case
    run = train(*QUICK, *words_of(name, tmp_path / "data"), small=False)
    check(case_of(run, tmp_path / "model", tmp_path / "said", *flags))


def test_the_page_s_example(train, tmp_path, monkeypatch, capsys):
    run = train(*QUICK, *DIGITS, small=False)
    monkeypatch.chdir(tmp_path)
    commands.dispatch(["export", str(run.folder), "my-model"])
    Image.new("L", (12, 12), 200).save("picture.png")
    page = Path(__file__).parents[2] / "docs/export.md"
    (code,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
    capsys.readouterr()
    exec(compile(code, "export.md", "exec"), {"__name__": "page"})
    label, score = capsys.readouterr().out.split()
    assert label in "0123456789" and 0.1 < float(score) < 1


@pytest.mark.parametrize("model", ["linear", "lenet"])
def test_a_model_that_transformers_does_not_know_is_refused(train, tmp_path, model):
    run = train("dataset=digits", f"model={model}", "dataset.image_size=16", *QUICK, small=False)
    with pytest.raises(UserError, match="is no transformers model and cannot be exported"):
        commands.dispatch(["export", str(run.folder), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def plain_environment(place):
    """An interpreter that sees transformers, torch, peft and Pillow, what these need, and nothing else."""
    venv.create(place, symlinks=True, with_pip=False)
    (site,) = place.glob("lib/python*/site-packages")
    waiting, linked = ["transformers", "torch", "peft", "pillow"], set()
    while waiting:
        name = re.match(r"[\w.-]+", waiting.pop())[0].lower().replace("_", "-")
        if name in linked:
            continue
        linked.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        waiting += [one for one in found.requires or () if "extra ==" not in one]
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(found.locate_file(top)).resolve())
    return place / "bin/python"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_export_in_an_environment_without_this_package(train, tmp_path):
    """FEDFROZEN_PLAIN_PYTHON names another interpreter with transformers, torch, peft and Pillow."""
    cases = []
    for name in NAMES + ADAPTERS:
        run = train(*QUICK, *words_of(name, tmp_path / name / "data"), small=False, folder=f"{name}/run")
        for flags in ((), ("--merge",)) if name in ADAPTERS else ((),):
            folder = " ".join([name, *(flag.strip("-") for flag in flags)])
            case = case_of(run, tmp_path / "exported" / folder, tmp_path / "said" / folder, *flags)
            cases.append(case)
    (tmp_path / "exported").rename(tmp_path / "moved")  # a folder may be anywhere
    for case in cases:
        case["folder"] = case["folder"].replace("/exported/", "/moved/")
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    python = os.environ.get("FEDFROZEN_PLAIN_PYTHON") or plain_environment(tmp_path / "environment")
    script = [str(python), "-I", plain_transformers.__file__, str(tmp_path / "cases.json")]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=1500, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    off = json.loads(ended.stdout.splitlines()[-1])
    print(json.dumps(off, indent=1), file=sys.stderr)
    assert len(off) == len(cases) and max(off.values()) <= plain_transformers.TOLERANCE
