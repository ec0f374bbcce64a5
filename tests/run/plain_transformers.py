"""What somebody does who has an exported folder and no fedfrozen: load it, read rows, compare the scores.

    python -I plain_transformers.py CASES.json       # a list of what `case_of` in exported.py describes

Nothing of fedfrozen is imported here.
"""

import contextlib
import importlib.util
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

TOLERANCE = 1e-5
AUTO = {
    "image": transformers.AutoModelForImageClassification,
    "text": transformers.AutoModelForSequenceClassification,
    "multilabel": transformers.AutoModelForSequenceClassification,
    "tokens": transformers.AutoModelForTokenClassification,
    "language": transformers.AutoModelForCausalLM,
}
PIPELINES = {"image": "image-classification", "text": "text-classification"}


def check(case):
    """Load the case's folder and compare with what the run said; how far its scores are off at most."""
    folder, kind = Path(case["folder"]), case["kind"]
    model = loaded(case)
    expected = load_file(case["expected"])
    worst = 0.0
    for number, inputs in enumerate(inputs_of(case)):
        with torch.no_grad():
            logits = model(**inputs).logits
        found = logits.mean(dim=0) if case["chunks"] > 1 else logits[0]
        wanted = expected[str(number)]
        if kind == "language":  # a prompt alone: what follows it is not known yet
            wanted = wanted[: len(found)]
        assert found.shape == wanted.shape, (number, found.shape, wanted.shape)
        worst = max(worst, float((found - wanted).abs().max()))
    assert worst <= TOLERANCE, f"{folder}: the scores are off by {worst}"
    if kind != "language":
        assert list(model.config.id2label.values()) == case["classes"]
    if kind in PIPELINES and case["chunks"] == 1:
        check_pipeline(case, model, expected)
    if kind == "language":
        check_generation(case, model)
    assert run_example(folder, case)
    return worst


def loaded(case):
    auto = AUTO[case["kind"]]
    if not case["adapter"]:
        return auto.from_pretrained(case["folder"]).eval()
    from peft import PeftModel

    base = case["base"] or f"{case['folder']}/base"
    labels = dict(enumerate(case["classes"]))
    named = {"id2label": labels, "ignore_mismatched_sizes": True} if case["base"] and labels else {}
    return PeftModel.from_pretrained(auto.from_pretrained(base, **named), case["folder"]).eval()


def reader(case):
    if case["kind"] == "image":
        return transformers.AutoImageProcessor.from_pretrained(case["folder"], backend="pil")
    return transformers.AutoTokenizer.from_pretrained(case["folder"])


def inputs_of(case):
    read = reader(case)
    for row in case["rows"]:
        if case["kind"] == "image":
            yield read(Image.open(row).convert(case["mode"]), return_tensors="pt")
        elif case["kind"] == "tokens" and not case["joined"]:
            yield read(row, is_split_into_words=True, truncation=True, return_tensors="pt")
        elif case["kind"] == "tokens":
            yield read(" ".join(row), truncation=True, return_tensors="pt")
        elif case["chunks"] > 1:
            cut = {"truncation": True, "return_overflowing_tokens": True, "padding": True}
            pieces = read(row, return_tensors="pt", **cut)
            yield {name: pieces[name][: case["chunks"]] for name in ("input_ids", "attention_mask")}
        else:
            yield read(row, truncation=True, return_tensors="pt")


def check_pipeline(case, model, expected):
    """The likeliest class of the first rows."""
    read = reader(case)
    named = {"image_processor": read} if case["kind"] == "image" else {"tokenizer": read}
    pipe = transformers.pipeline(PIPELINES[case["kind"]], model=model, **named)
    for number, row in enumerate(case["rows"][:5]):
        if case["kind"] == "text":
            answer = pipe(row, truncation=True)[0]
        else:
            picture = Image.open(row).convert(case["mode"])
            answer = pipe(np.asarray(picture)[None] if case["mode"] == "L" else picture)[0]
        scores = expected[str(number)].softmax(dim=-1)
        assert answer["label"] == case["classes"][int(scores.argmax())]
        assert abs(answer["score"] - float(scores.max())) < 1e-4


def check_generation(case, model):
    """As the run wrote after the same prompts, up to where a text ends."""
    read = reader(case)
    for prompt, opening, after in case["written"]:
        inputs = {name: ids[:, :opening] for name, ids in read(prompt, return_tensors="pt").items()}
        length = inputs["input_ids"].shape[1]
        room = min(case["new_tokens"], read.model_max_length - length)
        new = model.generate(**inputs, max_new_tokens=room)[0, length:]
        assert after.startswith(read.decode(new, skip_special_tokens=True).strip())
    assert model.generation_config.do_sample is False


def run_example(folder, case):
    """The Python of the model card, wherever the folder lies; what it prints."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", (folder / "README.md").read_text(), re.M | re.S)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    code = code.replace('folder = "."', f"folder = {str(folder)!r}")
    output, before = io.StringIO(), Path.cwd()
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(output):
        os.chdir(place)
        try:
            if case["kind"] == "image":
                Image.open(case["rows"][0]).save("picture.png")
            exec(compile(code, "README.md", "exec"), {"__name__": "example"})
        finally:
            os.chdir(before)
    return output.getvalue()


if __name__ == "__main__":
    assert importlib.util.find_spec("fedfrozen_app") is None
    print(json.dumps({case["name"]: check(case) for case in json.loads(Path(sys.argv[1]).read_text())}))
