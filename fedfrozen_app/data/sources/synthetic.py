"""Synthetic clinical notes for a first run without files: no patients, no hospitals, words by dice.

A note has a presenting problem, a history, something denied, a test and a treatment. It can be read as

- classification: the specialty of the presenting problem (history and denials point elsewhere);
- multilabel: the specialties of all problems the patient has, the presenting one first;
- entities: problem, test and treatment spans, a BIO tag a word.

Hospitals see unlike mixes of specialties (`partition=natural partition.column=hospital`).
"""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, Rows, reads

NOTES, VISITS, HOSPITALS = 1500, 2, 8
# specialty: problems, tests, treatments
WORDS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "cardiology": (
        ["chest pain", "atrial fibrillation", "heart failure", "palpitations", "angina"],
        ["echocardiogram", "stress test", "troponin level"],
        ["metoprolol", "a coronary stent", "aspirin"],
    ),
    "neurology": (
        ["a severe headache", "seizures", "ischemic stroke", "hand tremor", "vertigo"],
        ["brain mri", "electroencephalogram", "lumbar puncture"],
        ["levetiracetam", "thrombolysis", "sumatriptan"],
    ),
    "gastroenterology": (
        ["abdominal pain", "gastric ulcer", "bloody stools", "jaundice", "reflux"],
        ["colonoscopy", "liver panel", "upper endoscopy"],
        ["omeprazole", "mesalamine", "a gluten free diet"],
    ),
    "pulmonology": (
        ["shortness of breath", "pneumonia", "productive cough", "asthma attacks", "wheezing"],
        ["chest x-ray", "spirometry", "sputum culture"],
        ["albuterol", "azithromycin", "home oxygen"],
    ),
    "orthopedics": (
        ["knee pain", "a hip fracture", "low back pain", "shoulder stiffness", "joint swelling"],
        ["bone scan", "knee radiograph", "joint aspiration"],
        ["physical therapy", "a walking brace", "naproxen"],
    ),
    "urology": (
        ["flank pain", "kidney stones", "blood in the urine", "urinary retention", "frequent urination"],
        ["urinalysis", "renal ultrasound", "cystoscopy"],
        ["tamsulosin", "a urinary catheter", "lithotripsy"],
    ),
}
OPENINGS = ("the patient presents with", "this patient complains of", "admitted for", "seen today because of")
HISTORIES = ("past history of", "known for", "history is notable for", "previously treated for")
DENIALS = ("denies", "no sign of", "negative for")
FINDINGS = ("was abnormal", "was unremarkable", "showed a mild change", "confirmed the suspicion")
STARTS = ("started on", "treated with", "plan is", "discharged with")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


class _Note:
    """Words with their tags, as they are written down."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.tags: list[str] = []

    def say(self, text: str, kind: str | None = None) -> None:
        words = text.split()
        self.words += words
        self.tags += ["O"] * len(words) if kind is None else [f"B-{kind}", *[f"I-{kind}"] * (len(words) - 1)]


@reads("classification", "multilabel", "entities", path=False)
def read_synthetic(spec: DatasetSpec) -> Found:
    """The same notes for every run: the seed is the data set's own."""
    rng = np.random.default_rng(20250411)
    mixes = rng.dirichlet([1.0] * len(WORDS), size=HOSPITALS)
    task = {"entities": "tokens", "multilabel": "multilabel"}.get(spec.task or "", "text")
    rows = Rows([], [], {"hospital": [], "patient": [], "document": []}, [])
    for number in range(NOTES):
        patient, visit = divmod(number, VISITS)
        hospital = patient % HOSPITALS
        if visit == 0:
            main = list(WORDS)[rng.choice(len(WORDS), p=mixes[hospital])]
        note, specialties = _write(rng, main)
        rows.content.append(note.words if task == "tokens" else " ".join(note.words))
        rows.labels.append({"tokens": note.tags, "multilabel": specialties}.get(task, specialties[0]))
        rows.columns["hospital"].append(f"hospital {hospital}")
        rows.columns["patient"].append(f"patient {patient}")
        rows.columns["document"].append(f"note {number}")
        rows.origins.append(f"synthetic note {number}")
    return Found(task, rows, None, unit="patient")


def _write(rng: np.random.Generator, main: str) -> tuple[_Note, list[str]]:
    others = [name for name in WORDS if name != main]
    other, denied = (str(name) for name in rng.choice(others, 2, replace=False))

    def one(options: list[str] | tuple[str, ...]) -> str:
        return str(options[rng.integers(len(options))])

    note, specialties = _Note(), [main]
    parts = ["present", "test", "treatment"]
    if rng.random() < 0.4:
        parts.append("history")
        specialties.append(other)
    if rng.random() < 0.4:
        parts.append("denial")
    for part in rng.permutation(parts).tolist():
        if part == "present":
            note.say(one(OPENINGS))
            note.say(one(WORDS[main][0]), "problem")
        elif part == "history":
            note.say(one(HISTORIES))
            note.say(one(WORDS[other][0]), "problem")
        elif part == "denial":
            note.say(one(DENIALS))
            note.say(one(WORDS[denied][0]), "problem")
        elif part == "test":
            # Now and then a test or a treatment of something else: words alone do not settle the answer.
            note.say(one(WORDS[main if rng.random() < 0.85 else denied][1]), "test")
            note.say(one(FINDINGS))
        else:
            note.say(one(STARTS))
            note.say(one(WORDS[main if rng.random() < 0.85 else other][2]), "treatment")
        note.say(".")
    return note, specialties


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A word a token: the notes' own words, for models that bring no vocabulary."""
    phrases = [phrase for lists in WORDS.values() for options in lists for phrase in options]
    sentences = [*phrases, *OPENINGS, *HISTORIES, *DENIALS, *FINDINGS, *STARTS, "."]
    words = sorted({word for phrase in sentences for word in phrase.split()})
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"},
    )
