"""The ten lines of a model card that load an exported model with plain transformers, and use it."""

from dataclasses import dataclass

PIPELINES = {
    "image": "image-classification",
    "text": "text-classification",
    "multilabel": "text-classification",
    "tokens": "token-classification",
    "language": "text-generation",
}
AUTO = {
    "image": "AutoModelForImageClassification",
    "text": "AutoModelForSequenceClassification",
    "multilabel": "AutoModelForSequenceClassification",
    "tokens": "AutoModelForTokenClassification",
    "language": "AutoModelForCausalLM",
}
USE = {
    "image": """\
processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
picture = Image.open("picture.png").convert("MODE")
with torch.no_grad():
    scores = model(**processor(picture, return_tensors="pt")).logits.softmax(dim=-1)[0]
print(model.config.id2label[int(scores.argmax())], float(scores.max()))""",
    "text": """\
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer("A text.", truncation=True, return_tensors="pt")
with torch.no_grad():
    scores = model(**inputs).logits.softmax(dim=-1)[0]
print(model.config.id2label[int(scores.argmax())], float(scores.max()))""",
    "multilabel": """\
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer("A text.", truncation=True, return_tensors="pt")
with torch.no_grad():
    scores = model(**inputs).logits.sigmoid()[0].tolist()
print([model.config.id2label[number] for number, score in enumerate(scores) if score > 0.5])""",
    "tokens": """\
tokenizer = AutoTokenizer.from_pretrained(folder)
words = ["A", "sentence", "as", "words", "."]
INPUTS
with torch.no_grad():
    tags = model(**inputs).logits[0].argmax(dim=-1)
for number, word in enumerate(words):  # its tag is that of its first token
    token = FIRST
    print(word, "is beyond the length" if token is None else model.config.id2label[int(tags[token])])""",
    "language": """\
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer("Hello" + SEPARATOR, return_tensors="pt")
written = model.generate(**inputs, max_new_tokens=LENGTH)[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(written, skip_special_tokens=True))""",
}


@dataclass(frozen=True)
class Exported:
    """Properties of an exported folder, besides those in the run's files."""

    kind: str  # the task
    model_class: str  # of transformers
    parameters: int
    classes: tuple[str, ...]
    adapter: bool = False  # a PEFT adapter, loaded on its base
    base: str | None = None  # the base's location; None: in the folder
    reads: str = ""  # preprocessing of an input, in sentences
    grey: bool = False  # pictures have one channel
    joins_words: bool = False  # entities: a sentence is its words with spaces between them
    separator: str = ""  # for a language model: between prompt and answer
    new_tokens: int = 32  # to generate
    chunks: int = 1  # of a long text, whose scores are averaged


WHOLE = """\
inputs = tokenizer("A text.", truncation=True, return_tensors="pt")
with torch.no_grad():
    scores = model(**inputs).logits."""
IN_CHUNKS = """\
inputs = tokenizer(
    "A text.", truncation=True, return_overflowing_tokens=True, padding=True, return_tensors="pt"
)
chunks = {name: inputs[name][:CHUNKS] for name in ("input_ids", "attention_mask")}
with torch.no_grad():
    scores = model(**chunks).logits.mean(dim=0, keepdim=True)."""
# Byte tokens do not mark word starts: the words are joined by spaces.
JOINED = (
    'inputs = tokenizer(" ".join(words), truncation=True, return_tensors="pt")',
    'inputs.char_to_token(len(" ".join([*words[:number], ""])))',
)
WORDS = (
    'inputs = tokenizer(words, is_split_into_words=True, truncation=True, return_tensors="pt")',
    "next((place for place, of in enumerate(inputs.word_ids()) if of == number), None)",
)


def example(exported: Exported) -> list[str]:
    """Fenced Python. `folder` is the folder of the model card."""
    if exported.kind not in AUTO:
        return [f"Load it as transformers' {exported.model_class}, by `from_pretrained`."]
    auto = AUTO[exported.kind]
    reader = "AutoImageProcessor" if exported.kind == "image" else "AutoTokenizer"
    elsewhere = exported.adapter and exported.base is not None and bool(exported.classes)
    lines = ["import json"] if elsewhere else []
    lines += ["import torch"] if exported.kind != "language" else []
    lines += ["from PIL import Image"] if exported.kind == "image" else []
    lines += ["from peft import PeftModel"] if exported.adapter else []
    lines += [f"from transformers import {reader}, {auto}", "", 'folder = "."  # where this file lies']
    lines += _load(exported, auto)
    inputs, first = JOINED if exported.joins_words else WORDS
    filled = {
        "MODE": "L" if exported.grey else "RGB",
        "INPUTS": inputs,
        "FIRST": first,
        "LENGTH": str(exported.new_tokens),
        " + SEPARATOR": f" + {exported.separator!r}" if exported.separator else "",
    }
    use = USE[exported.kind]
    if exported.chunks > 1:
        use = use.replace(WHOLE, IN_CHUNKS.replace("CHUNKS", str(exported.chunks)))
    for place, value in filled.items():
        use = use.replace(place, value)
    lines += use.splitlines()
    return ["```python", *lines, "```"]


SETS = """\
rule = json.load(open(f"{folder}/calibration.json"))
scores = (logits / rule["temperature"]).softmax(dim=-1)
for number in scores.argsort(descending=True).tolist():
    if 1 - float(scores[number]) <= rule["threshold"]:  # in the prediction set
        print(model.config.id2label[number], float(scores[number]))"""


def calibrated_example(exported: Exported) -> list[str]:
    """The example with temperature and prediction set; empty unless one class is predicted per row."""
    if exported.kind not in ("image", "text"):
        return []
    lines = ["import json", *example(exported)[1:-2]]
    place = next(number for number, line in enumerate(lines) if line.strip().startswith("scores = "))
    line = lines[place].replace("scores = ", "logits = ").replace(".softmax(dim=-1)", "")
    plain = (
        [one for one in lines[:place] if one != "import json"]
        if lines.count("import json") > 1
        else lines[1:place]
    )
    return ["```python", "import json", *plain, line, *SETS.splitlines(), "```"]


def _load(exported: Exported, auto: str) -> list[str]:
    if not exported.adapter:
        return [f"model = {auto}.from_pretrained(folder).eval()"]
    if exported.base is None:
        base = [f'base = {auto}.from_pretrained(f"{{folder}}/base")']
    elif exported.classes:
        base = [
            'labels = dict(enumerate(json.load(open(f"{folder}/fedfrozen.json"))["classes"]))',
            f"base = {auto}.from_pretrained(",
            f"    {exported.base!r}, id2label=labels, ignore_mismatched_sizes=True",
            ")",
        ]
    else:
        base = [f"base = {auto}.from_pretrained({exported.base!r})"]
    return [*base, "model = PeftModel.from_pretrained(base, folder).eval()"]
