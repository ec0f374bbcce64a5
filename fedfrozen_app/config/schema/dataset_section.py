"""`dataset.*`: where the examples come from and how they are read."""

from dataclasses import dataclass

from fedfrozen_app.config.needs import (
    LABEL_KINDS,
    MADE_KINDS,
    MIXED_KINDS,
    PICTURE_KINDS,
    SPLIT_KINDS,
    TEXT_KINDS,
    not_with,
    only_with,
)
from fedfrozen_app.config.settings import MISSING, setting

PROPOSED = "(the proposal's)"  # `dataset.statistics` at a site: it opens no file that a server names


@dataclass
class DatasetConfig:
    name: str = setting(MISSING, "A name for reports")
    kind: str = setting(
        MISSING,
        "How to read it: `digits`, `digit_words`, `images`, `parquet`, `text`, `hub`, `conll`, `brat`, "
        "`i2b2`, `mimic`, `synthetic`, `dicom`, `nifti`, `omop`, `instructions` (prompts and answers for a "
        "language model), `table` (columns of numbers and categories), `arrays` (NumPy files)",
    )
    task: str | None = setting(
        None,
        "`classification`, `multilabel`, `entities` or `language`; of a table also `regression`, `survival` "
        "or what an installed package brings; of `images` and `nifti` also `segmentation` (images/NAME and "
        "masks/NAME). `null`: what the kind of data suggests",
    )
    path: str | None = setting(
        None,
        "Folder or file; for `hub` the name there, or `name:config`",
        needs=not_with("dataset", *MADE_KINDS, add="dataset=text, images or another kind that reads files"),
    )
    train_split: str = setting(
        "train",
        "Name of the train folder, file, split or value of a `split` column",
        needs=only_with("dataset", *SPLIT_KINDS),
    )
    test_split: str = setting("test", "The same for the test rows", needs=only_with("dataset", *SPLIT_KINDS))
    image_column: str | None = setting(
        None, "`null`: the column that holds images", needs=only_with("dataset", *MIXED_KINDS)
    )
    text_column: str | None = setting(
        None, "`null`: `text` or `sentence`", needs=only_with("dataset", "text", *MIXED_KINDS)
    )
    label_column: str | None = setting(
        None,
        "`null`: `label`, `labels` or `class`. `instructions`: rows are partitioned by it; `null`: one class",
        needs=only_with("dataset", *LABEL_KINDS),
    )
    prompt_column: str | None = setting(
        None,
        "`instructions`: `null`: `prompt`, `question` or `instruction`; without one every token is predicted",
        needs=only_with("dataset", "instructions"),
    )
    answer_column: str | None = setting(
        None,
        "`instructions`: `null`: `answer`, `response`, `completion`, `output` or `text`",
        needs=only_with("dataset", "instructions"),
    )
    separator: str | None = setting(
        None,
        "`instructions`: the text between prompt and answer. `null`: the end of a line",
        needs=only_with("dataset", "instructions"),
    )
    prompt_loss: bool = setting(
        False,
        "`instructions`: `true`: a prompt's tokens count in the loss too. `false`: the answer's alone",
        needs=only_with("dataset", "instructions"),
    )
    unit_column: str | None = setting(
        None,
        "Rows with one value of this column (a patient) are never split over splits and clients. `null`: "
        "the reader knows",
    )
    unmarked: str = setting(
        "sentences",
        "`conll`: what is never split in a file without `-DOCSTART-`: `sentences` (each is a unit of its "
        "own) or `files` (a file is one document; always so with `privacy.unit=document`)",
        choices=("sentences", "files"),
        needs=only_with("dataset", "conll"),
    )
    top_labels: int | None = setting(None, "`multilabel`: only the most frequent labels", least=2)
    image_size: int | None = setting(
        None,
        "Resize to so many pixels a side. `null`: as the pictures are",
        needs=only_with("dataset", *PICTURE_KINDS),
    )
    channels: int | None = setting(
        None,
        "1 or 3. `null`: 1 where every picture is grey, else 3",
        needs=only_with("dataset", *PICTURE_KINDS),
    )
    max_tokens: int | None = setting(
        None,
        "The longest text that a model reads, in tokens; of chunks, the length of each. `null`: what 95 % of "
        "the server's own texts need, at most 512, or 128 for a chunk",
        least=1,
        needs=only_with("dataset", *TEXT_KINDS),
    )
    long_texts: str = setting(
        "cut",
        "What becomes of longer texts. `cut`: their end is not read. `chunks`: they are read in chunks, over "
        "whose logits a prediction is the mean; for classes and labels, without `privacy=dp_sgd`",
        choices=("cut", "chunks"),
        needs=only_with("dataset", *TEXT_KINDS),
    )
    max_chunks: int | None = setting(
        None,
        "Chunks of a text at most. `null`: what 95 % of the server's own texts need, at most 8",
        least=2,
        needs=only_with("dataset.long_texts", "chunks"),
    )
    tokenizer: str = setting(
        "auto",
        "`learned`: subwords from the server's own validation rows or `dataset.tokenizer_text`. `own`: the "
        "model's or data set's own; bytes where there is none. A path: the `tokenizer.json` of a run. "
        "`auto`: `learned` for a transformer from scratch, else `own`",
        needs=only_with("dataset", *TEXT_KINDS),
    )
    tokenizer_text: str | None = setting(
        None,
        "A UTF-8 file, or a folder of `*.txt`: public text, or the server's own, that the subwords are "
        "learned from, a line each. No client's text belongs there",
        needs=not_with("dataset.tokenizer", "own", add="dataset.tokenizer=learned"),
    )
    vocab_size: int = setting(
        2000,
        "Learned subwords at most, with the 256 bytes that they begin with",
        least=300,
        most=32768,
        needs=not_with("dataset.tokenizer", "own", add="dataset.tokenizer=learned"),
    )
    test_fraction: float = setting(
        0.2, "Held out for testing where the data bring no test split", above=0, most=0.9
    )
    split_seed: int = setting(
        0, "Of that split and of the server's validation rows: the same for every `seed`", least=0
    )
    keep_classes: list[str] | None = setting(
        None, "Only the rows of these classes: `dataset.keep_classes=[cat,dog]`"
    )
    novel: float = setting(
        0.0,
        "Share of the classes, the last in their order, that no client trains on: models that read class "
        "names are evaluated on them too",
        least=0,
        most=0.9,
    )
    limit: int | None = setting(None, "At most so many train and so many test rows, for a quick try", least=1)
    validation: float = setting(
        0.1, "Share of the train rows that the server keeps to choose the best round by", least=0, most=0.9
    )
    client_validation: float = setting(
        0.1,
        "Share of each client's rows that the client holds out",
        least=0,
        most=0.9,
        needs=only_with("privacy", "none"),
    )
    window: list[float] | None = setting(
        None,
        "DICOM and NIfTI: centre and width: `dataset.window=[40,400]`. `null`: the file's own",
        needs=only_with("dataset", "dicom", "nifti"),
    )
    slices: int | None = setting(
        None,
        "DICOM and NIfTI: so many of each series. `null`: all",
        least=1,
        needs=only_with("dataset", "dicom", "nifti"),
    )
    query: str | None = setting(
        None,
        "`omop`: a SELECT that returns `person_id`, `label`, and `text` or columns to build one from. "
        "`table`: one that returns the table's columns; `dataset.path` is then a database",
        needs=only_with("dataset", "omop", "table"),
    )
    columns: list[str] | None = setting(
        None,
        "`table`: the columns that the model reads. `null`: all but the label, `partition.column` and "
        "`dataset.unit_column`",
        needs=only_with("dataset", "table"),
    )
    categorical: list[str] | None = setting(
        None,
        "`table`: columns that hold categories although their values are numbers. Columns of text always do",
        needs=only_with("dataset", "table"),
    )
    missing: str = setting(
        "median",
        "`table`: what becomes of missing values. `median`: a number gets the median of its column, a "
        "category a "
        "level of its own. `drop`: the row is left out",
        choices=("median", "drop"),
        needs=only_with("dataset", "table"),
    )
    indicators: bool = setting(
        True,
        "`table`: a further input for each column with missing numbers, 1 where they are missing",
        needs=only_with("dataset.missing", "median"),
    )
    normalise: str = setting(
        "federation",
        "`table`: how numbers are scaled. `federation`: by the mean and deviation of all clients' train "
        "rows, `site`: "
        "each client's by its own train rows (the server's test rows by those of all), `none`: not at all",
        choices=("federation", "site", "none"),
        needs=only_with("dataset", "table"),
    )
    statistics: str | None = setting(
        None,
        "`table`: medians, means, scales and levels, in place of what the train rows say: a `table.json`, "
        "which a run writes, or the `census.json` of the sites. `privacy=dp_sgd` needs public values, or a "
        "census with noise",
        needs=only_with("dataset", "table"),
    )
    time_column: str | None = setting(
        None, "`survival`: how long a person was followed up", needs=only_with("dataset.task", "survival")
    )
    event_column: str | None = setting(
        None,
        "`survival`: 1 where the event was seen at that time, 0 where not",
        needs=only_with("dataset.task", "survival"),
    )
    survival_model: str = setting(
        "cox",
        "`survival`: `cox` (the partial likelihood within a batch) or `discrete` (a logistic hazard for "
        "each time "
        "interval, arXiv 2006.08997; exact under federation)",
        choices=("cox", "discrete"),
        needs=only_with("dataset.task", "survival"),
    )
    ties: str = setting(
        "breslow",
        "`cox`: how events at one time count: `breslow` or `efron`",
        choices=("breslow", "efron"),
        needs=only_with("dataset.task", "survival"),
    )
    intervals: int = setting(
        10,
        "`discrete`: so many intervals, with about as many events each",
        least=1,
        most=200,
        needs=only_with("dataset.survival_model", "discrete"),
    )
    time_edges: list[float] | None = setting(
        None,
        "`discrete`: where the intervals end, in place of `dataset.intervals`: "
        "`dataset.time_edges=[365,730,1095]`",
        needs=only_with("dataset.survival_model", "discrete"),
    )
    subgroups: list[str] | None = setting(
        None, "Columns by whose values a model is evaluated separately: `dataset.subgroups=[sex,age_band]`"
    )
    subgroup_floor: int = setting(
        10,
        "A group of fewer people is not reported, nor anything that would reveal it",
        least=1,
        needs=not_with("dataset.subgroups", "null", add="dataset.subgroups=[COLUMN]"),
    )
    align: float = setting(
        0.0,
        "Share of the train rows for `fedfrozen align` alone: no run with the same value trains or tests on "
        "them",
        least=0,
        most=0.9,
    )
    augment: str = setting(
        "none",
        "Augmentation of clients' train pictures, drawn again for every step. `crop_flip`: shift by up to 4 "
        "pixels each way, with reflected borders, and flip left and right by chance",
        choices=("none", "crop_flip"),
        needs=only_with("dataset", *PICTURE_KINDS),
    )
    mean: list[float] | None = setting(
        None,
        "Per channel, of pixels in 0..1. `null`: from the train pixels",
        needs=only_with("dataset", *PICTURE_KINDS),
    )
    std: list[float] | None = setting(
        None, "The same for the standard deviation", needs=only_with("dataset", *PICTURE_KINDS)
    )
