"""What command lines compose to, on record: a default that moves is moved on purpose.

`python -m tests.config.test_composed` writes the record anew.
"""

import json
from pathlib import Path

import pytest

from fedfrozen_app.config import compose_config
from fedfrozen_app.core.conf_files import conf_dir
from fedfrozen_app.core.formatting import flatten
from tests.conftest import slowly

RECORD = Path(__file__).with_name("composed.json")
FILES = [
    f"{path.parent.name}={path.stem}" for path in sorted(conf_dir().glob("*/*.yaml")) if path.stem != "base"
]
MORE = [
    "strategy=safl dataset=mtsamples model=checkpoint",
    "strategy=safl client=sgd client.lr=0.5 partition=iid",
    "strategy=pfeddc client=adamw model=hub dataset=hub",
    "strategy=pfeddc strategy.mu=0.5 strategy.prompts=global num_rounds=3",
    "strategy=fedprox strategy.mu=1 privacy=dp_sgd privacy.epsilon=2 runtime=flower",
    "strategy=fedfrozen strategy.warmup_rounds=auto aggregation=krum aggregation.malicious=1",
    "experiment=cifar10 strategy=fedavg dataset=images runtime.name=deployed",
    "experiment=digits_skewed strategy=fedprox partition=domain model=vit_cifar",
    "experiment=digits_skewed model.config.hidden_size=8 +model.config.qkv_bias=false",
    "dataset=maccrobat dataset.path=there dataset.keep_classes=[a,b] checkpoint.every=0 track.wandb=true",
    "from=there seed=7 early_stop.patience=3 output_dir=out run_id=x device=cpu",
]


def flat(words):
    """Every key with its value, in the order in which `--cfg job` prints them."""
    from omegaconf import OmegaConf

    resolved_config = OmegaConf.to_container(compose_config(words))
    return flatten({key: value for key, value in resolved_config.items() if key != "hydra"})


def record():
    usual = flat([])
    found = {}
    for words in [*FILES, *MORE]:
        own = flat(words.split())
        changed = {key: value for key, value in own.items() if usual.get(key, "absent") != value}
        found[words] = {"has": changed, "lacks": [key for key in usual if key not in own]}
    RECORD.write_text(json.dumps({"usual": usual, "others": found}, indent=1) + "\n")


LINES = list(json.loads(RECORD.read_text())["others"] if RECORD.exists() else [])


@pytest.mark.parametrize("words", [*LINES[::3], *slowly(*LINES[1::3], *LINES[2::3])])
def test_a_command_line_composes_to_what_it_did(words):
    known = json.loads(RECORD.read_text())
    told = known["others"][words]
    expected = {key: value for key, value in known["usual"].items() if key not in told["lacks"]} | told["has"]
    composed = flat(words.split())
    assert {key: composed.get(key, "absent") for key in expected} == expected
    assert not set(told["lacks"]) & set(composed)


def test_every_file_is_on_record():
    known = json.loads(RECORD.read_text())
    assert set(FILES) <= set(known["others"])
    assert flat([]).items() >= known["usual"].items()


if __name__ == "__main__":
    record()
