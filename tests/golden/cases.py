"""The golden cases: command lines, and nothing else, so that they outlive every rebuild of the inside.

Models and data are as small as they can be while every part still moves. One thread: bits repeat for a thread
count only.
"""

from dataclasses import dataclass

PLAIN = ["runtime.threads=1", "device=cpu", "track.tensorboard=false", "checkpoint.keep=100"]
TINY = [
    *("model.config.hidden_size=8", "model.config.intermediate_size=16"),
    *("model.config.num_hidden_layers=2", "model.config.num_attention_heads=2"),
]
SMALL = [
    *("num_clients=3", "num_rounds=3", "dataset.limit=64", "partition.min_size=8"),
    *("client.batch_size=16", "client.local_epochs=1", *PLAIN),
]
SOME = [
    "num_clients=4",
    "participation=0.5",
    "num_rounds=4",
]  # partial participation: who is away, and what for

PULLED = ["client.local_epochs=2"]  # FedProx pulls from the second step on; some take one an epoch

# Digits and a ViT. With these figures the kernel's common movement falls below the threshold far from a tie.
AUTO = [
    *("strategy.warmup_rounds=auto", "strategy.warmup_minimum=1", "strategy.warmup_window=2"),
    *("strategy.warmup_patience=1", "strategy.warmup_span=1", "strategy.warmup_progress=1"),
    *("strategy.warmup_threshold=0.2", "num_rounds=5"),
]
DIGITS = {
    "fedavg": ["strategy=fedavg"],
    "fedprox": ["strategy=fedprox", "strategy.mu=0.5", *SOME, *PULLED],
    "fedfrozen": ["strategy=fedfrozen", "strategy.warmup_rounds=2", *SOME],
    "fedfrozen_auto": ["strategy=fedfrozen", *AUTO],
    "fedfrozen_random": ["strategy=fedfrozen", "strategy.warmup_rounds=1", "strategy.freeze_scope=random"],
    "local": ["strategy=local", *SOME],
}
DIGITS = {name: ["model=vit_tiny", *words] for name, words in DIGITS.items()}

# Synthetic notes and a BERT of three layers: one of them is chosen.
NOTES = ["strategy=safl", "model.config.num_hidden_layers=3", "strategy.top_k=1"]
SAFL = {
    "safl": [*NOTES, "seed=2"],  # with this one clients and rounds choose different layers
    "safl_keep": [*NOTES, "strategy.keep=0.625", *SOME],
    "safl_fixed": [*NOTES, "strategy.select=fixed"],
    "safl_random": [*NOTES, "strategy.select=random", *SOME],
}

# A random CLIP, built from its configuration: nothing to train beforehand.
TOWER = ["hidden_size=16", "num_hidden_layers=2", "num_attention_heads=2", "intermediate_size=16"]
CLIP = [
    *("~model.config", "+model.config={}", "model.name=clip_random", "model.source=config"),
    *("model.model_type=clip", "+model.config.projection_dim=8", "dataset.align=0"),
    *(f"+model.config.{tower}_config.{word}" for tower in ("text", "vision") for word in TOWER),
    *("+model.config.text_config.vocab_size=384", "+model.config.text_config.max_position_embeddings=40"),
    *("+model.config.vision_config.image_size=8", "+model.config.vision_config.patch_size=4"),
    "+model.config.vision_config.num_channels=1",
]
PROMPTS = ["strategy=pfeddc", "strategy.text_tokens=3", "strategy.vision_tokens=2", "strategy.heads=2"]
PROMPTS += ["client.lr=0.1"]
PFEDDC = {
    "pfeddc": [*PROMPTS, *CLIP, *SOME],
    "pfeddc_global": [*PROMPTS, *CLIP, "strategy.prompts=global", "strategy.mu=0.5", *PULLED],
}

# The encoders that strategy=pfeddc trains for itself, as small as they go.
ALIGNED = [
    *(f"model.config.{tower}.hidden_size=8" for tower in ("text", "vision")),
    *(f"model.config.{tower}.num_hidden_layers=1" for tower in ("text", "vision")),
    *(f"model.config.{tower}.num_attention_heads=2" for tower in ("text", "vision")),
    *(f"model.config.{tower}.intermediate_size=8" for tower in ("text", "vision")),
    "model.config.projection_dim=8",
]
SEEDED = ["privacy=dp_sgd", "privacy.seeded_noise=true"]  # without the seed no two private runs are alike


# After how many rounds these are stopped as well, on both sides of FedFrozen's switch.
STOPS = {"fedavg": 2, "fedfrozen": 1, "fedfrozen_auto": 2, "local": 2, "safl": 2, "pfeddc": 2}
STOPS_FLOAT64 = {"fedfrozen": 3}
# Clients that choose layers of their own train one by one under the cohort runner too; `safl` alone shows it.
ONE_BY_ONE = {"safl_keep", "safl_random"}
# Variants whose strategy is there in float64 already; they wait for a release.
FLOAT32_ONLY = {"fedfrozen_random", "safl_fixed", "safl_random", "pfeddc_global"}
# Whose rounds are worked out by hand in tests/strategies at every test run.
BY_HAND = {"fedprox"}
# This one shows the cohort runner in every test run; the other twins wait for a release.
TWIN_OF = "fedfrozen"


@dataclass(frozen=True)
class Case:
    name: str
    words: list[str]
    stop: int | None = None  # also kept as a run that was stopped after so many rounds
    slow: bool = False


def _inprocess() -> list[Case]:
    found = []

    def add(name: str, words: list[str], stop: int | None = None, *, slow: bool = False) -> None:
        found.append(Case(name, [*SMALL, *words], stop, slow))

    for family, model in (DIGITS, TINY), (SAFL, TINY), (PFEDDC, []):
        for name, words in family.items():
            words = [*model, *words]
            rare = name in BY_HAND | FLOAT32_ONLY | ONE_BY_ONE
            add(f"{name}-sequential", [*words, "runtime.runner=sequential"], STOPS.get(name), slow=rare)
            if name not in ONE_BY_ONE:
                add(f"{name}-cohort", [*words, "runtime.runner=cohort"], slow=name != TWIN_OF)
            if name not in FLOAT32_ONLY:
                double = [*words, "runtime.runner=sequential", "model.dtype=float64"]
                add(f"{name}-float64", double, STOPS_FLOAT64.get(name), slow=name != "fedfrozen")
    for name in ("fedavg", "fedfrozen"):
        words = [*TINY, *DIGITS[name], "runtime.runner=cohort", "model.dtype=float64"]
        add(f"{name}-cohort-float64", words, slow=True)
    for rule in ("krum", "median", "trimmed_mean"):  # of five: with four the last two would be the same
        words = [*TINY, *DIGITS["fedavg"], f"aggregation={rule}", "num_clients=5"]
        add(f"{rule}-sequential", [*words, "runtime.runner=sequential"], slow=rule != "median")
    add("trimmed_mean-cohort", [*words, "runtime.runner=cohort"], slow=True)
    # Clients that clip every example train one by one, whatever the runner.
    add("private_fedavg", [*TINY, *DIGITS["fedavg"], *SEEDED, "runtime.runner=sequential"], stop=2)
    add("private_safl", [*TINY, *NOTES, *SEEDED, "runtime.runner=sequential"], slow=True)
    add("pfeddc_aligned", [*PROMPTS, *ALIGNED, "runtime.runner=sequential"], slow=True)
    return found


def _flower() -> list[Case]:
    kinds = {name: [*TINY, *words] for name, words in (DIGITS | {"safl": NOTES}).items()} | PFEDDC
    few = ["num_rounds=2", "num_clients=2", "participation=1.0", "runtime=flower"]
    switch = {"fedfrozen": ["strategy.warmup_rounds=1"]}
    names = ("fedavg", "fedprox", "fedfrozen", "local", "safl", "pfeddc")
    words = {name: [*SMALL, *kinds[name], *few, *switch.get(name, [])] for name in names}
    return [Case(f"{name}-flower", words[name], slow=True) for name in names]


CASES = [*_inprocess(), *_flower()]
