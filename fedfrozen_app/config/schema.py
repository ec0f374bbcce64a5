"""Every setting of a run: a dataclass for each section, a field for each key. See `setting`.

The YAML files in `conf/` inherit these defaults as their `base` and say only what they change.
"""

from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from fedfrozen_app.config.settings import setting

MISSING: Any = "???"  # OmegaConf's mark for a value that must be given; a typo should not wait for its import
DEFAULT_CLIENTS = 10
# The sections that a file is chosen for: model=vit_tiny. The others are part of the root.
# Groups whose keys belong to what is named, and where the registry has it: its class has `Settings`.
NAMED = {"strategy": "strategies", "server_optimizer": "server_optimizers"}
GROUPS = (
    *("model", "adapter", "dataset", "partition", "client", "privacy", "aggregation"),
    *("secure_aggregation", "runtime"),
)


@dataclass
class ModelConfig:
    name: str = setting(MISSING, "A name for reports")
    source: str = setting(
        MISSING,
        "`config` (random weights), `checkpoint` (local folder), `hub` (download), `linear` (logistic "
        "regression on pixels), `cnn`, `lenet` and `moderate_cnn` (convolutional networks of others' "
        "benchmarks), `aligned` (a dual encoder made on this machine from `dataset.align`)",
    )
    # Every file says whether it has one: null in a file would win over "???", and not the other way round.
    path: str | None = setting(MISSING, "Folder of a checkpoint, or name on the Hugging Face hub")
    model_type: str | None = setting(
        None,
        "Architecture for `source=config`: `vit`, `deit`, `dinov2`, `bert`, `distilbert`, `roberta`, "
        "`electra`, `modernbert`, `deberta-v2`, `gpt2`, `llama`, `qwen2`, `qwen3`, `mistral`, `gemma`, "
        "`gemma3_text`, `clip`, `siglip`; with `model.roles` any other; to be read through prompts `clip` or "
        "`vision-text-dual-encoder`",
    )
    dtype: str = setting("float32", "Of the parameters: `float32`, `float64` or `bfloat16`")
    roles: str | None = setting(
        None,
        "A file that says what the parameters of another architecture are for; see "
        "[Language models](language-models.md#architectures). `null`: the built-in table",
    )
    gradient_checkpointing: bool = setting(
        False,
        "Compute a block's activations again when its gradients need them: less memory, about a third more "
        "time. Clients then train one after another",
    )
    config: dict[str, Any] = setting(
        {},
        "Settings of the transformers configuration, such as `model.config.hidden_size=64`. Add one that "
        "the file lacks with `+`: `+model.config.qkv_bias=false`. Sizes that the data decide are filled in",
    )


@dataclass
class AdapterConfig:
    name: str = setting(
        "none",
        "Set by the file. `lora`: the model's weights are frozen, and low-rank adapters beside them train "
        "and travel, with the head; see [Adapters](adapters.md)",
    )
    rank: int = setting(8, "r: of each adapter, and the largest that a client may have", least=1)
    alpha: float = setting(16.0, "An adapter's product counts α/r times", above=0)
    dropout: float = setting(0.0, "Of what an adapter reads, in training", least=0, most=0.9)
    targets: Any = setting(
        ["query", "value"],
        "Which projections have one, by role: of `query`, `key`, `value`, `output`, `mlp`, `kernel` and "
        "`all`, or a role with its layer (`value.0`)",
    )
    layers: str | None = setting(
        None, "In these layers alone, from 0: `adapter.layers=8-11`, or one. `null`: all"
    )
    rule: str = setting(
        "average",
        "How clients' adapters become one: `average`, `ffa`, `fedex` or `stack`; see [Adapters](adapters.md)",
    )
    ranks: dict[str, Any] = setting(
        {}, "Smaller ranks of single clients, by name: `+adapter.ranks.0=4`. All others have `adapter.rank`"
    )
    path: str | None = setting(None, "Start from the adapters of a peft folder. `null`: from fresh ones")


@dataclass
class DatasetConfig:
    name: str = setting(MISSING, "A name for reports")
    kind: str = setting(
        MISSING,
        "How to read it: `digits`, `digit_words`, `images`, `parquet`, `text`, `hub`, `conll`, `brat`, "
        "`i2b2`, `mimic`, `synthetic`, `dicom`, `nifti`, `omop`, `instructions` (prompts and answers for a "
        "language model)",
    )
    task: str | None = setting(
        None,
        "`classification`, `multilabel`, `entities` or `language`. `null`: what the kind of data suggests",
    )
    path: str | None = setting(None, "Folder or file; for `hub` the name there, or `name:config`")
    train_split: str = setting("train", "Name of the train folder, file, split or value of a `split` column")
    test_split: str = setting("test", "The same for the test rows")
    image_column: str | None = setting(None, "`null`: the column that holds images")
    text_column: str | None = setting(None, "`null`: `text` or `sentence`")
    label_column: str | None = setting(
        None,
        "`null`: `label`, `labels` or `class`. `instructions`: what rows are dealt by; `null`: all alike",
    )
    prompt_column: str | None = setting(
        None,
        "`instructions`: `null`: `prompt`, `question` or `instruction`; without one every token is foretold",
    )
    answer_column: str | None = setting(
        None, "`instructions`: `null`: `answer`, `response`, `completion`, `output` or `text`"
    )
    separator: str | None = setting(
        None, "`instructions`: what stands between prompt and answer. `null`: the end of a line"
    )
    prompt_loss: bool = setting(
        False, "`instructions`: `true`: a prompt's tokens count in the loss too. `false`: the answer's alone"
    )
    unit_column: str | None = setting(
        None,
        "Rows with one value of this column (a patient) are never parted over splits and clients. `null`: "
        "the reader knows",
    )
    top_labels: int | None = setting(None, "`multilabel`: only the most frequent labels", least=2)
    image_size: int | None = setting(None, "Resize to so many pixels a side. `null`: as the pictures are")
    channels: int | None = setting(None, "1 or 3. `null`: 1 where every picture is grey, else 3")
    max_tokens: int = setting(128, "Longer texts are cut", least=1)
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
        "Share of the classes, the last in their order, that nobody trains on: models that read class names "
        "are judged on them too",
        least=0,
        most=0.9,
    )
    limit: int | None = setting(None, "At most so many train and so many test rows, for a quick try", least=1)
    validation: float = setting(
        0.1, "Share of the train rows that the server keeps to choose the best round by", least=0, most=0.9
    )
    client_validation: float = setting(
        0.1, "Share of each client's rows that the client holds out", least=0, most=0.9
    )
    window: list[float] | None = setting(
        None,
        "DICOM and NIfTI: centre and width: `dataset.window=[40,400]`. `null`: the file's own",
    )
    slices: int | None = setting(None, "DICOM and NIfTI: so many of each series. `null`: all", least=1)
    query: str | None = setting(
        None, "`omop`: a SELECT that gives `person_id`, `label`, and `text` or columns to make one of"
    )
    subgroups: list[str] | None = setting(
        None, "Columns by whose values a model is judged apart: `dataset.subgroups=[sex,age_band]`"
    )
    subgroup_floor: int = setting(
        10, "A group of fewer people is not told by itself, nor what would give it away", least=1
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
        "What clients do to their train pictures, anew for every step. `crop_flip`: shift by up to 4 pixels "
        "each way, with reflected borders, and flip left and right by chance",
        choices=("none", "crop_flip"),
    )
    mean: list[float] | None = setting(None, "Per channel, of pixels in 0..1. `null`: from the train pixels")
    std: list[float] | None = setting(None, "The same for the standard deviation")


@dataclass
class PartitionConfig:
    name: str = setting(
        "dirichlet",
        "Set by the file",
        choices=(
            *("dirichlet", "iid", "labels", "shards", "quantity", "noise"),
            *("natural", "domain", "file", "like"),
        ),
    )
    alpha: float = setting(
        0.3,
        "Dirichlet concentration: small means few classes for each client, large means all alike",
        above=0,
    )
    column: str | None = setting(
        None, "Column to divide by (`natural`, `domain`). `null`: the only one, or `domain`"
    )
    min_size: int = setting(
        10,
        "No drawn client gets fewer rows. Where a Dirichlet draw leaves one short, rows of one class move to "
        "it from one other client, and the log says so",
        least=1,
    )
    clients_per_domain: int = setting(
        1, "`domain`: several clients share a domain by `partition.alpha`", least=1
    )
    labels: int = setting(2, "`labels`: classes of each client", least=1)
    shards: int = setting(2, "`shards`: shards of each client", least=1)
    balanced: bool = setting(
        False, "`dirichlet`: clients of equal size, each with a mix of classes of its own"
    )
    capped: bool = setting(
        False,
        "`dirichlet`: a client that has its share of all rows gets none of the classes that follow, as "
        "FedMA, NIID-Bench and NVFLARE deal them",
    )
    noise: float = setting(
        0.0,
        "Feature shift: client i of N sees its train pictures with Gaussian noise of standard deviation "
        "`noise`·i/N, in units of the pixels' range. With `dirichlet` or `labels`: label and feature shift "
        "together",
        least=0,
        most=10,
    )
    path: str | None = setting(
        None,
        "`file`: names the client of every train row. CSV with a column `client`, in the rows' order or with "
        "a column `row` (from 0); or JSON, a list of clients, or of each client a list of its rows",
    )
    census: str | None = setting(
        None,
        "`like`: the `census.json` of `fedfrozen census`, whose sites' sizes and label mixes clients get",
    )


@dataclass
class ClientConfig:
    optimizer: str = setting("adamw", "A fresh one every round", choices=("adamw", "sgd"))
    lr: float = setting(3e-3, "For small models from scratch. Use 1e-4 or less for pretrained ones", above=0)
    weight_decay: float = setting(0.01, "Frozen parameters are never decayed", least=0)
    momentum: float = setting(0.0, "`sgd` only", least=0, most=1)
    local_epochs: int = setting(2, "Passes over the client's rows in a round", least=1)
    local_steps: int | None = setting(None, "At most so many steps in a round. `null`: whole epochs", least=1)
    batch_size: int = setting(16, "Rows in a step", least=1)
    lr_schedule: str = setting("cosine", "Over the rounds", choices=("constant", "linear", "cosine"))
    lr_final: float = setting(
        0.1, "Where `linear` and `cosine` end, as a share of `client.lr`", least=0, most=1
    )
    clip: float | None = setting(
        None,
        "Largest gradient norm. `null`: no clipping. With privacy `privacy.max_grad_norm` takes its place",
        above=0,
    )
    precision: str = setting(
        "float32",
        "`tf32`: float32 whose products a GPU rounds to 10 bits of mantissa; `bf16`: autocast",
        choices=("float32", "tf32", "bf16"),
    )
    class_weights: bool = setting(False, "Weigh the loss by each client's inverse class frequency")
    head_lr: float | None = setting(
        None,
        "The head's own learning rate, on the same schedule: a new head on a pretrained model often wants a "
        "larger one. `null`: `client.lr`",
        above=0,
    )
    fusion_lr: float | None = setting(
        None,
        "The same for parameters of the role `fusion`, where a model has them. `null`: `client.lr`",
        above=0,
    )


@dataclass
class PrivacyConfig:
    name: str = setting(
        "none",
        "Set by the file. `none`: data stay on the client, updates travel as they are. `dp_sgd`: "
        "differential privacy on the client",
        choices=("none", "dp_sgd"),
    )
    epsilon: float = setting(
        8.0, "What each client may spend over the whole run; then it declines", least=0.01, most=1000
    )
    delta: float | None = setting(
        None,
        "`null`: 1e-5, or 0.1 divided by the client's number of examples where that is less",
        above=0,
        most=0.5,
    )
    max_grad_norm: float = setting(
        1.0,
        "C: each example's gradient is clipped to this norm, over all trained parameters together",
        least=1e-6,  # far smaller ones have no digits left in float32, and clipped gradients would be longer
        most=1e6,
    )
    unit: str = setting(
        "example",
        "Whom epsilon protects. A larger unit gives one of its rows to a step",
        choices=("example", "document", "patient"),
    )
    unit_column: str | None = setting(
        None, "The column that names a row's document or patient. `null`: the one called like the unit"
    )
    examples: int | None = setting(
        None,
        "The number of examples (or other units) that every client declares: its weight, and what its "
        "sampling rate comes from. `null`: its true number, once, when it first takes part",
        least=1,
    )
    accountant: str = setting(
        "prv", "`prv` (numerical composition, tight) or `rdp` (Rényi)", choices=("prv", "rdp")
    )
    selection: str = setting(
        "noisy",
        "Layers that are chosen from private data: `noisy` (paid for), `public` (on the server's validation "
        "rows instead) or `unaccounted` (epsilon does not cover the choice)",
        choices=("noisy", "public", "unaccounted"),
    )
    selection_share: float = setting(0.1, "`noisy`: share of epsilon for the choices", above=0, most=0.9)
    selection_every: int = setting(
        5, "`noisy`: choose anew every so many rounds in which the client takes part", least=1
    )
    selection_rate: float = setting(
        0.25, "`noisy`: chance of an example to count in a choice", above=0, most=1
    )
    clipping: str = setting(
        "per_example",
        "`per_example`: each example's gradient is worked out and clipped. `ghost`: the same sums with less "
        "memory, where only layers and heads are trained; see [Privacy](privacy.md)",
        choices=("per_example", "ghost"),
    )
    physical_batch: int = setting(
        64, "Examples whose gradients are in memory at once; changes no result", least=1
    )
    audited: str | None = setting(
        None,
        "Watch the client with this name and plant canaries among its examples, for `fedfrozen audit`: a run "
        "to test privacy with, not a model to use, and every output says so. `null`: none; see "
        "[Privacy](privacy.md#audit)",
    )
    canaries: int = setting(
        1000,
        "`audited`: so many made-up examples, each planted by a coin. A larger epsilon takes more of "
        "them to tell",
        least=0,
    )
    seeded_noise: bool = setting(
        False,
        "`true`: noise and samples come from `seed`, to repeat a simulation. Not private, and every output "
        "says so",
    )


@dataclass
class AggregationConfig:
    name: str = setting("mean", "Set by the file", choices=("mean", "trimmed_mean", "median", "krum"))
    trim: float = setting(
        0.2, "`trimmed_mean`: share cut off at either end of each value", least=0, most=0.49
    )
    malicious: int = setting(
        0,
        "`krum`: so many of a round's clients may send poison; with fewer than `malicious` + 3 replies the "
        "model stays as it was",
        least=0,
    )
    far_out: float | None = setting(
        None,
        "Set aside an update whose norm is over so many times the median of the last round's. `null`: none; "
        "never in the first round",
        least=1,
    )
    quorum: float = setting(
        0.0,
        "Share of a round's clients whose replies must be sound, or the model stays as it was",
        least=0,
        most=1,
    )


@dataclass
class SecureAggregationConfig:
    """The same for all clients of a run: a site holds every order against them."""

    name: str = setting(
        "off",
        "Set by the file. `on`: clients mask what they send, and the server learns sums over a round's "
        "clients, never one client's update; see [Secure aggregation](secure-aggregation.md)",
        choices=("off", "on"),
    )
    min_cohort: int = setting(
        3, "No sum over fewer clients. A site's policy may ask for more", least=2, most=100_000
    )
    threshold: float = setting(
        2 / 3,
        "Share of a round's clients that must stay to its end, or it changes nothing; always more than half",
        least=0.5,
        most=1,
    )
    neighbours: int | None = setting(
        None,
        "With how many others a client shares masks. `null`: with all, or 32 where a round has more than 33",
        least=2,
    )
    bits: int = setting(32, "Of every number that travels: 16, 24 or 32", least=16, most=32)
    clip: float = setting(
        1.0, "Largest change of a single weight in a round; what is larger is clipped, and counted", above=0
    )
    state_clip: float = setting(
        10.0, "The same for a method's arrays beside the weights, such as SCAFFOLD's", above=0
    )
    max_norm: float | None = setting(
        None, "Largest norm of a client's whole update, kept by the client itself. `null`: none", above=0
    )
    max_examples: int = setting(
        10_000, "No client counts for more examples in the mean", least=1, most=10_000_000
    )
    noise: str = setting(
        "site",
        "Of `privacy=dp_sgd`: `site` (each client's update has all its noise) or `sum` (each client adds a "
        "share, and the sum has the whole; one step a round over all rows); see "
        "[Privacy](privacy.md#noise-in-the-sum)",
        choices=("site", "sum"),
    )
    choices: str = setting(
        "union",
        "Where clients choose layers (`strategy=safl`): `union` (a client sends zeros for those that it did "
        "not choose, and nobody learns what it chose) or `groups` (clients tell the server first, and those "
        "with one choice make a sum of their own, of these layers alone); see "
        "[Secure aggregation](secure-aggregation.md#where-clients-choose-layers)",
        choices=("union", "groups"),
    )
    step_timeout: float = setting(
        60, "Seconds to wait for a client in the steps that carry keys and no update", above=0
    )


@dataclass
class RuntimeConfig:
    name: str = setting("inprocess", "Set by the file", choices=("inprocess", "flower", "deployed"))
    runner: str = setting(
        "auto",
        "`sequential` (one client after another), `cohort` (a round's clients at once; in process only) or "
        "`auto` (`cohort` on a GPU and, on a CPU, for models under 100,000 parameters; else `sequential`)",
        choices=("auto", "sequential", "cohort"),
    )
    max_block: int | None = setting(
        None, "`cohort`: train at most so many clients at once. `null`: as many as fit", least=1
    )
    gpus: int = setting(
        1,
        "`cohort`, in process: over how many of this machine's GPUs the clients of a round are spread. Each "
        "holds the model and the data",
        least=1,
    )
    compile: Any = setting(
        "auto",
        "`cohort` on a GPU: compile the step before it is captured as a CUDA graph. `false` starts at once "
        "and steps slower; `auto` starts so too, and compiles the model's blocks from a plan's second round "
        "on where the rest of the run is long enough to pay for it; `true` compiles the whole step first, "
        "which takes minutes for a deep model and then steps quickest",
        choices=("auto", "true", "false"),
    )
    capture: bool = setting(
        True, "`sequential` on a GPU: replay one recorded step (a CUDA graph). `false`: step by step"
    )
    stack_runs: str = setting(
        "auto",
        "How many runs of one shape (other seeds, partitions, rates) a sweep in process trains side by side, "
        "in one stacked step: a number, `off`, or `auto` (on a GPU and for models under a million parameters "
        "as many as make 100 clients; on a CPU none)",
    )
    threads: int | None = setting(
        None,
        "torch's threads. `null`: torch chooses; one, where `runner=auto` finds a very small model",
        least=1,
    )
    cpus_per_client: int = setting(1, "`flower`: CPUs that Ray reserves for a client", least=1)
    gpus_per_client: float = setting(0.0, "`flower`: GPUs, or a share of one", least=0)
    round_timeout: float = setting(3600, "Seconds to wait for a round's replies", above=0)
    node_timeout: float = setting(
        300, "Seconds to wait for the nodes to appear, and for one that was killed to come back", above=0
    )
    min_nodes: int | None = setting(
        None, "Real sites: start once so many are there. `null`: `num_clients`, else 2", least=1
    )
    server_kit: str | None = setting(
        None, "`deployed`: the folder of an operator's kit, of `fedfrozen provision`"
    )
    view: str | None = setting(
        None, "`deployed`: the view of their data that the sites train on. `null`: the only one a site has"
    )
    approval_timeout: float = setting(
        86400, "`deployed`: seconds to wait for sites where a person must approve the run", above=0
    )
    cache_dir: str | None = setting(
        None, "`flower`: where clients keep the arrays they hold. `null`: under `$FLWR_HOME/fedfrozen/cache`"
    )
    cache_gb: float = setting(
        4.0, "Size of that folder at most; what was not used for longest goes first", least=0
    )


@dataclass
class CheckpointConfig:
    every: int = setting(
        1, "Rounds between checkpoints; 0 writes none. The last round always gets one, unless 0", least=0
    )
    keep: int = setting(2, "How many of the newest checkpoints to keep", least=1)
    uploads: str | None = setting(
        None,
        "Keep every upload of the client with this name, in `uploads/`, for `fedfrozen audit`. `null`: of "
        "none",
    )


@dataclass
class EarlyStopConfig:
    patience: int | None = setting(
        None,
        "Stop after so many evaluations without a better accuracy on the server's validation rows",
        least=1,
    )


@dataclass
class TrackConfig:
    tensorboard: bool = setting(
        True,
        "Write the scalars of `metrics.jsonl` as TensorBoard events, in `tensorboard/` of the run's folder",
    )
    wandb: bool = setting(False, "Send them to Weights & Biases as well; needs the extra `wandb`")
    mlflow: bool = setting(False, "Send them to MLflow as well; needs the extra `mlflow`")
    project: str = setting("fedfrozen", "The W&B project, and the MLflow experiment")


@dataclass
class DebugConfig:
    nan: bool = setting(
        False, "Stop at the operation whose gradient is not a number, and name it; several times slower"
    )
    profile: bool = setting(
        False, "Write where a round's time goes: `profile.png`, and every function in `profile.txt`"
    )


@dataclass
class Config:
    # A strategy knows its own settings: its class checks these (see strategies/).
    strategy: dict[str, Any] = field(default_factory=dict)
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    secure_aggregation: SecureAggregationConfig = field(default_factory=SecureAggregationConfig)
    # So does a server optimiser (see server/optimizer.py).
    server_optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "none"})
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    num_clients: int | None = setting(
        None,
        "Number of clients. `null`: 10, or one for each node under plain `flwr run`, or as many as "
        "`partition=natural` and `partition=domain` find",
        least=1,
    )
    num_rounds: int = setting(32, "Rounds of training", least=0)
    participation: float = setting(1.0, "Share of the clients drawn for each round", above=0, most=1)
    eval_every: int = setting(
        1, "Evaluate the global model every so many rounds, and after the last", least=1
    )
    personal: bool | None = setting(
        None,
        "At the end, judge every client on test rows of its own (`personal.json`, `fairness.png`). `null`: "
        "where clients have models of their own",
    )
    seed: int = setting(0, "Fixes partitions, cohorts, initial weights, batch order and dropout", least=0)
    device: str = setting("auto", "`auto` takes a GPU where there is one", choices=("auto", "cpu", "cuda"))
    run_id: str | None = setting(
        None, "What the sites know a deployed run by, also when it is resumed. `null`: drawn at its start"
    )
    output_dir: str | None = setting(
        None, "Where the results go. `null`: Hydra's folder, `outputs/DATE/TIME`"
    )
    overwrite: bool = setting(
        False, "`true`: a run that the folder holds already is lost. `false`: then nothing begins"
    )
    start_from: str | None = setting(  # the key is `from`, which Python keeps for itself
        None, "Start from another run's checkpoint: `RUN/checkpoints/N`"
    )
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)


def key_of(name: str) -> str:
    """How a field of `Config` is written in a configuration."""
    return "from" if name == "start_from" else name


def sections() -> dict[str, type]:
    """The dataclass of every section of a run, by its key."""
    found: dict[str, type] = {}
    for one in fields(Config):
        if isinstance(one.default_factory, type) and is_dataclass(one.default_factory):
            found[one.name] = one.default_factory
    return found


def defaults(kind: type) -> dict[str, Any]:
    """Key -> default of a section, as plain values for YAML files to inherit; `???` where there is none."""
    values = {}
    for found in fields(kind):
        if found.default_factory is not NO_DEFAULT:
            values[found.name] = found.default_factory()
        else:
            values[found.name] = MISSING if found.default is NO_DEFAULT else found.default
    return values


def root_defaults() -> dict[str, Any]:
    """What `conf/config.yaml` inherits: every key that belongs to no group."""
    nested = sections()
    top_level = {
        key_of(found.name): found.default for found in fields(Config) if found.default is not NO_DEFAULT
    }
    return top_level | {name: defaults(kind) for name, kind in nested.items() if name not in GROUPS}
