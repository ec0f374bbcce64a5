"""pFedDC as a whole: what travels, what stays, what is learned, with a tiny random CLIP."""

import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch.nn import functional
from transformers import ByT5Tokenizer, CLIPConfig, CLIPModel

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.adapters.design import PromptDesign
from fedfrozen_app.adapters.dual import DualEncoder
from fedfrozen_app.adapters.dual_load import random_dual
from fedfrozen_app.adapters.prompts import build_prompted
from fedfrozen_app.config import compose_config, compose_run, read, resolved
from fedfrozen_app.core.digests import raw_bytes
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.data.table import InputShape
from fedfrozen_app.exchange.arrays import to_record, to_tensors
from fedfrozen_app.exchange.count import Traffic, bytes_by_role
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.files import checkpoint
from fedfrozen_app.handlers import train_handler
from fedfrozen_app.local import cohort
from fedfrozen_app.local import worker_for as workers
from fedfrozen_app.local.batches import batches
from fedfrozen_app.local.client_state import keep_private, kept_arrays
from fedfrozen_app.local.cohort import CohortRunner
from fedfrozen_app.local.worker import Worker, make_data_spec
from fedfrozen_app.models.roles import roles_of
from fedfrozen_app.run.federate import federate
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.flower.simulation import run_app
from fedfrozen_app.server.connection import connect
from fedfrozen_app.server.federation import Federation
from fedfrozen_app.server.prompt_learning import state_of
from fedfrozen_app.sites.audit_log import read_audit
from strategies.pfeddc import PFedDC
from tests.conftest import Run, same_bits
from tests.server.wire import forget_process, wired
from tests.sites.inprocess import SiteGrid, with_prompts
from tests.strategies.dual import CLIP, TEXT_TOKENS, TEXT_WIDTH, VISION_TOKENS, VISION_WIDTH, WORDS, flat
from tests.strategies.watched import PROJECT, read_all, watch

FLOATS = {"text": TEXT_TOKENS * TEXT_WIDTH, "vision": VISION_TOKENS * VISION_WIDTH}


def workers_of(*words):
    config = read(resolved(compose_config([*WORDS, *words])))
    corpus = load_corpus(config)
    return Worker(config, corpus, shares=share_out(corpus, config, config.num_clients))


def prompts(run, tower, level="global"):
    return run.model[f"prompts.{tower}.{level}"]


@pytest.mark.parametrize(
    ("design", "floats"),
    [
        (["strategy.modalities=both"], FLOATS["text"] + FLOATS["vision"]),
        (["strategy.modalities=text"], FLOATS["text"]),
        (["strategy.modalities=vision", "strategy.depth=2"], 2 * FLOATS["vision"]),
        pytest.param(["strategy.prompts=global"], FLOATS["text"] + FLOATS["vision"], marks=pytest.mark.slow),
        pytest.param(["strategy.fusion=sum"], FLOATS["text"] + FLOATS["vision"], marks=pytest.mark.slow),
        pytest.param(["strategy.fusion=concat"], FLOATS["text"] + FLOATS["vision"], marks=pytest.mark.slow),
        pytest.param(
            ["strategy.fusion_query=local"], FLOATS["text"] + FLOATS["vision"], marks=pytest.mark.slow
        ),
        (["strategy.prompts=local"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_only_global_prompts_travel_to_the_byte(train, design, floats):
    run = train(*WORDS, *design, "num_rounds=1", "client.local_steps=2", small=False)
    row = run.rows[1]
    expected = {"prompt": 3 * 4 * floats} if floats else {}
    assert row["bytes_up_by_role"] == row["bytes_down_by_role"] == expected
    assert row["clients_failed"] == 0
    local = "local" in design[0] and "query" not in design[0]
    assert row["train_loss"] > 0 and (row["test_accuracy"] > 0 or local)


VIT_B_16 = {
    "projection_dim": 512,
    "text_config": {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8},
    "vision_config": {
        **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
        **{"intermediate_size": 3072, "image_size": 224, "patch_size": 16},
    },
}
KIB_80 = (16 * 512 + 16 * 768) * 4


def test_prompts_for_a_clip_of_published_size_are_80_kib():
    """ViT-B/16's shape, 16 + 16 tokens of depth 1: what the plan sends and takes, and all that it keeps."""
    with torch.device("meta"):
        clip = DualEncoder(random_dual("clip", VIT_B_16), ByT5Tokenizer())
    shape = InputShape("image", ("dog", "horse"), channels=3, image_size=224)
    model = build_prompted(clip, PromptDesign(), shape=shape, seed=0)
    assert sum(value.numel() for value in clip.parameters()) > 149e6
    strategy = PFedDC(Federation(connect(None, roles_of(model))))
    strategy.model = {n: p for n, p in model.named_parameters() if n not in model.frozen_names}
    strategy.digests.update(dict.fromkeys(strategy.model, ""))
    request, traffic, roles = strategy.request(1, {}), Traffic(), strategy.federation.roles
    traffic.sent("0", bytes_by_role({name: strategy.model[name] for name in request.base}, roles), 0)
    traffic.received("0", {name: strategy.model[name] for name in request.plan.shared}, "", roles)
    assert traffic.down == traffic.up == KIB_80 == 80 * 1024
    assert traffic.down_by_role == traffic.up_by_role == {"prompt": KIB_80}
    assert strategy.upload_bytes(1) == {"prompt": KIB_80}
    kept = sum(strategy.model[name].numel() for name in request.plan.private)
    assert kept == 16 * 512 + 16 * 768 + 4 * (512**2 + 768**2)


@pytest.mark.slow
def test_a_round_with_a_clip_of_published_size_sends_80_kib(train):
    """The same with random weights, a real step on a real picture, and messages that were counted."""
    words = ["~model.config", "+model.config={}", "model.source=config", "model.model_type=clip"]
    words += [*flat(VIT_B_16, "model.config"), "dataset.align=0", "dataset.image_size=224"]
    words += ["dataset.channels=3", "dataset.limit=10", "dataset.validation=0", "dataset.client_validation=0"]
    words += ["num_clients=1", "partition=iid", "num_rounds=1", "eval_every=9", "client.local_steps=1"]
    run = train("strategy=pfeddc", *words, "client.batch_size=2", "personal=false", small=False)
    assert run.rows[1]["bytes_up_by_role"] == run.rows[1]["bytes_down_by_role"] == {"prompt": KIB_80}
    assert run.rows[1]["clients_failed"] == 0


@pytest.mark.pictures
@pytest.mark.slow
def test_the_whole_strategy_with_a_tiny_random_clip(tmp_path):
    """The command as a user gives it: rounds, private parts, personal models, picture, checkpoints."""
    words = [*WORDS, "personal=true", "participation=0.7", f"hydra.run.dir={tmp_path}/run"]
    assert command([*words, f"output_dir={tmp_path}/run"]) == 0
    run = Run(tmp_path / "run")
    assert run.summary["status"] == "completed" and run.summary["clients_failed"] == 0
    row = run.rows[-1]
    for key in ("fusion_gap", "local_moved"):
        assert row[f"{key}_text"] > 0 and row[f"{key}_vision"] > 0
    assert row["client_val_before"] >= 0 and row["client_val_after"] >= 0
    personal = json.loads((run.folder / "personal.json").read_text())
    assert len(personal["clients"]) == 3 and {"global", "personal", "after"} <= set(personal)
    assert sum(line["clients"] for line in personal["by_participation"]) == 3
    assert sum(client["rounds"] for client in personal["clients"]) == 2 * 2
    assert (run.folder / "fairness.png").stat().st_size > 5000
    assert command(["personal", str(run.folder), f"png={tmp_path}/again.png"]) == 0


def test_one_client_s_step_is_coop_s(train):
    """prompts=global, text only, one client: w − lr·∂loss, with the loss written out on CLIP's own parts."""
    words = ["strategy.prompts=global", "strategy.modalities=text", "num_clients=1", "partition=iid"]
    words += ["num_rounds=1", "client.local_steps=1", "client.momentum=0", "client.weight_decay=0"]
    run = train(*WORDS, *words, small=False)
    worker = workers_of(*words)
    clip = worker.model.backbone.model
    start = worker.initial()["prompts.text.global"].clone().requires_grad_(True)  # (1, tokens, width)
    (rows,) = batches(worker.rows("0").train, worker.config.client, 0, "0", 1)
    pixels = worker.corpus.train.inputs["pixel_values"][rows]
    labels = worker.corpus.train.labels[rows]

    names = [f"{name}." for name in worker.corpus.classes]
    texts = []
    table = clip.text_model.embeddings
    for name in names:
        ids = torch.tensor([*(byte + 3 for byte in name.encode()), 1])  # ByT5: bytes from 3 on, 1 ends
        embedded = torch.cat([start[0], table.token_embedding(ids)])
        embedded = (embedded + table.position_embedding.weight[: len(embedded)]).unsqueeze(0)
        mask = torch.full((len(embedded[0]),) * 2, -torch.inf).triu(1)[None, None]
        hidden = clip.text_model.encoder(inputs_embeds=embedded, attention_mask=mask).last_hidden_state
        texts.append(clip.text_projection(clip.text_model.final_layer_norm(hidden)[0, -1]))
    images = clip.get_image_features(
        pixel_values=worker.task.prepare({"pixel_values": pixels})["pixel_values"]
    )
    images = getattr(images, "pooler_output", images)
    cosine = functional.normalize(images, dim=-1) @ functional.normalize(torch.stack(texts), dim=-1).T
    functional.cross_entropy(clip.logit_scale.exp() * cosine, labels).backward()
    expected = start.detach() - 0.1 * start.grad
    assert start.grad.abs().max() > 1e-4
    torch.testing.assert_close(prompts(run, "text"), expected, rtol=1e-4, atol=1e-6)


def test_two_clients_global_prompts_are_averaged_by_rows(train, monkeypatch):
    sent = []
    real = train_handler.train_reply

    def watch(message, reply, *, local):
        sent.append((reply.examples, {name: value.clone() for name, value in reply.arrays.items()}))
        return real(message, reply, local=local)

    monkeypatch.setattr(train_handler, "train_reply", watch)
    run = train(*WORDS, "num_clients=2", "num_rounds=1", "personal=false", small=False)
    (n1, one), (n2, two) = sent
    assert n1 != n2 and set(one) == {"prompts.text.global", "prompts.vision.global"}
    for name, value in one.items():
        torch.testing.assert_close(run.model[name], (n1 * value + n2 * two[name]) / (n1 + n2))


# With this seed client 2 is drawn in round 1, misses five rounds, and is drawn again in round 7.
MISSES_FIVE = ["num_rounds=7", "participation=0.34", "client.local_steps=2", "seed=30"]


def test_a_client_that_misses_five_rounds_goes_on_with_the_newest_global_prompts(train, monkeypatch):
    began = {}
    real = train_handler.train_client

    def watch(worker, client, request, start, steps):
        began[request.round, client] = {name: value.clone() for name, value in start.model.items()}
        return real(worker, client, request, start, steps)

    monkeypatch.setattr(train_handler, "train_client", watch)
    run = train(*WORDS, *MISSES_FIVE, small=False)
    assert [row["clients"] for row in run.rows[1:]] == [["2"], ["0"], ["0"], ["0"], ["1"], ["1"], ["2"]]
    kept = [checkpoint.read(run.folder / "checkpoints" / str(n)).clients for n in range(1, 8)]
    assert all(same_bits(after["2"], kept[0]["2"]) for after in kept[:6])
    assert not any(torch.equal(kept[6]["2"][name], value) for name, value in kept[0]["2"].items())

    newest = {name: value for name, value in run.model_after(6).items() if name.endswith(".global")}
    start = began[7, "2"]
    assert set(start) == set(newest) | set(kept[0]["2"])
    assert all(torch.equal(start[name], value) for name, value in kept[0]["2"].items())  # its own, of round 1
    assert all(torch.equal(start[name], value) for name, value in newest.items())  # the others', of round 6
    first = run.model_after(1)
    assert not any(torch.equal(first[name], value) for name, value in newest.items())


@pytest.mark.slow
def test_private_parts_outlive_a_restart(train):
    """Stopped after round 2 and resumed from the folder alone: the same bits, also of who was not drawn."""
    words = [*WORDS, *MISSES_FIVE, "num_rounds=4"]
    run = train(*words, small=False)
    train(*words, "num_rounds=2", folder="part", small=False)
    part = train(*words, folder="part", resume=True, small=False)
    assert [row["clients"] for row in part.rows[1:]] == [["2"], ["0"], ["0"], ["0"]]
    assert same_bits(run.model, part.model)
    whole, again = (checkpoint.read(r.folder / "checkpoints" / "4").clients for r in (run, part))
    assert set(whole) == set(again) == {"0", "2"}
    assert all(same_bits(whole[client], again[client]) for client in whole)


@pytest.mark.parametrize(
    "design",
    [
        "strategy.modalities=both",
        pytest.param("strategy.modalities=text", marks=pytest.mark.slow),
        pytest.param("strategy.modalities=vision", marks=pytest.mark.slow),
        pytest.param(
            "strategy.prompts=global strategy.modalities=text strategy.mu=1", marks=pytest.mark.slow
        ),
        pytest.param("strategy.prompts=local", marks=pytest.mark.slow),
    ],
)
def test_cohort_equals_sequential(train, design):
    words = [*design.split(), "model.dtype=float64", "client.fusion_lr=0.3", "personal=true"]
    one = train(*WORDS, *words, folder="one", small=False)
    other = train(*WORDS, *words, "runtime.runner=cohort", folder="other", small=False)
    for name, value in one.model.items():
        torch.testing.assert_close(other.model[name], value, rtol=1e-7, atol=1e-9)
    states = [checkpoint.read(run.folder / "checkpoints" / "2").clients for run in (one, other)]
    for client, arrays in states[0].items():
        for name, value in arrays.items():
            torch.testing.assert_close(states[1][client][name], value, rtol=1e-6, atol=1e-9)
    for row, twin in zip(one.rows[1:], other.rows[1:], strict=True):
        for key, value in row.items():
            if key.startswith(("train_loss", "personal", "local_", "fusion_", "client_val", "bytes_")):
                assert twin[key] == pytest.approx(value, rel=1e-6), key
    assert one.summary["personal"]["personal"] == pytest.approx(other.summary["personal"]["personal"])


def test_local_prompts_get_no_gradient_before_the_output_moves(train):
    """W_O = 0: after one step only W_O has moved, after two the local prompts too."""
    words = ["strategy.modalities=text", "client.weight_decay=0", "num_clients=1", "partition=iid"]
    moved = []
    for steps in (1, 2):
        run = train(
            *WORDS, *words, "num_rounds=1", f"client.local_steps={steps}", folder=str(steps), small=False
        )
        moved.append(run.rows[1]["local_moved_text"])
    assert moved[0] == 0 < moved[1]


def test_a_fusion_that_leaves_nothing_of_the_global_prompt_is_called_so():
    assert [state_of(gap) for gap in (0.009, 0.01, 10, 10.1)] == [
        *("fusion inactive", "fusion active", "fusion active", "fusion drowns the global prompt")
    ]


def test_an_idle_fusion_is_called_so(train):
    run = train(*WORDS, "client.fusion_lr=1e-9", "num_rounds=1", small=False)
    assert run.summary["fusion"]["state"] == "fusion inactive"
    run = train(*WORDS, "client.fusion_lr=20", "num_rounds=1", folder="more", small=False)
    assert run.summary["fusion"]["state"] == "fusion active"


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.slow
def test_folders_of_domains_are_clients_that_read_class_names(train, tmp_path, split):
    """PACS's layout, DOMAIN/CLASS/*: a client of each domain, or several, each judged within its own."""
    pixels, labels = load_digits(n_class=2, return_X_y=True)
    for number in range(160):
        domain = ("photo", "sketch")[number % 2]
        shown = pixels[number] * 15 if domain == "photo" else 255 - pixels[number] * 15
        folder = tmp_path / "data" / domain / ("egg_shell", "pole")[labels[number]]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(shown.reshape(8, 8).astype(np.uint8)).save(folder / f"{number}.png")
    words = [word for word in WORDS if not word.startswith(("num_clients", "dataset.limit"))]
    words += ["dataset=images", f"dataset.path={tmp_path}/data", "partition=domain", "personal=true"]
    run = train(*words, f"partition.clients_per_domain={split}", small=False)
    personal = json.loads((run.folder / "personal.json").read_text())
    names = ["photo", "sketch"] if split == 1 else ["photo/0", "photo/1", "sketch/0", "sketch/1"]
    assert [client["name"] for client in personal["clients"]] == names
    assert sum(client["test_rows"] for client in personal["clients"]) == 32  # a fifth, each row once
    assert run.rows[-1]["clients_failed"] == 0
    config = read(resolved(compose_config(words)))
    assert load_corpus(config).classes == ("egg_shell", "pole")


@pytest.mark.parametrize("fusion", ["cross", "sum"])
@pytest.mark.slow
def test_evaluate_judges_what_the_server_judged(tmp_path, capsys, fusion):
    """The global prompts alone: a server has no client's local ones."""
    words = [*WORDS, f"strategy.fusion={fusion}", "client.lr=1", f"hydra.run.dir={tmp_path}/run"]
    assert command(words) == 0
    assert command(["evaluate", f"{tmp_path}/run"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    row = Run(tmp_path / "run").rows[-1]
    assert told["test_loss"] == pytest.approx(row["test_loss"])
    assert told["test_accuracy"] == pytest.approx(row["test_accuracy"])


def test_evaluate_says_where_to_look_when_there_is_no_global_model(train, capsys):
    run = train(*WORDS, "strategy.prompts=local", "num_rounds=1", small=False)
    assert command(["evaluate", str(run.folder)]) == 2
    assert "personal=true" in capsys.readouterr().err


def test_only_prompts_and_fusion_are_stacked(train, monkeypatch):
    stacked = set()

    class Watched(cohort.Step):
        def __init__(self, worker, layout, *args, **kwargs):
            stacked.update(layout.names)
            super().__init__(worker, layout, *args, **kwargs)

    monkeypatch.setattr(cohort, "Step", Watched)
    train(*WORDS, "runtime.runner=cohort", "num_rounds=1", small=False)
    assert stacked == set(workers_of().exchanged) and len(stacked) == 4 + 8


@pytest.mark.parametrize("template", ["a {} or a {}", "a {} {here}", "{ a {}"])
def test_a_template_is_read_as_it_is_written(template):
    clip = workers_of("strategy.prompts=none", "num_rounds=0").model.backbone
    texts = [template.replace("{}", name) for name in ("ice cream", "cup")]
    assert torch.equal(clip.words(("ice_cream", "cup"), 0, template).ids, clip.sentences(texts).ids)


def test_zero_shot_is_the_template_alone(train, monkeypatch):
    # Nobody trains, so there is no step whose memory the cohort runner could measure.
    monkeypatch.setattr(CohortRunner, "_room", lambda *given: pytest.fail("slots for nobody"))
    words = ["strategy.prompts=none", "num_rounds=0", "personal=true", "runtime.runner=cohort"]
    run = train(*WORDS, *words, small=False)
    assert run.rows[0]["test_accuracy"] == run.summary["final_test_accuracy"]
    personal = run.summary["personal"]
    assert personal["global"] == personal["personal"] and "after" not in personal
    worker = workers_of("strategy.prompts=none", "num_rounds=0")
    clip, texts = worker.model.backbone, worker.model.text_features()
    plain = clip.text(clip.sentences([f"a photo of a {name}." for name in worker.corpus.classes]))
    torch.testing.assert_close(texts, functional.normalize(plain, dim=-1))


def test_a_clip_from_a_local_folder_loads_and_trains(train, tmp_path):
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(**CLIP)).save_pretrained(tmp_path / "clip")
    words = [word for word in WORDS if "model." not in word]
    run = train(*words, "model=checkpoint", f"model.path={tmp_path}/clip", small=False)
    assert run.rows[-1]["clients_failed"] == 0 and run.rows[-1]["fusion_gap_text"] > 0


def test_a_site_with_other_encoders_takes_no_part(sites, tmp_path):
    """Each site names its own folder of the frozen encoders; one of them holds other weights."""
    for seed in (0, 1):
        torch.manual_seed(seed)
        CLIPModel(CLIPConfig(**CLIP)).save_pretrained(tmp_path / str(seed))
    for name in sites.names:
        sites.change(name, "site.yaml", model_path=str(tmp_path / str(int(name == "south"))))
    sites.settings = [word for word in sites.settings if "model." not in word]
    run = sites.train("model=checkpoint", f"model.path={tmp_path}/0", "num_rounds=1")
    assert run.rows[1]["clients_ok"] == 2
    (failure,) = run.rows[1]["failures"]
    assert "south" in failure and str(tmp_path) not in failure
    assert read_audit(sites.kit("south").audit)[-1]["event"] == "failed"


def test_encoders_that_differ_are_refused(tmp_path):
    """A node whose folder holds other weights learns so before it trains."""
    for seed in (0, 1):
        torch.manual_seed(seed)
        CLIPModel(CLIPConfig(**CLIP)).save_pretrained(tmp_path / str(seed))
    words = [word for word in WORDS if "model." not in word] + ["model=checkpoint"]
    servers = read(resolved(compose_config([*words, f"model.path={tmp_path}/0"])))
    corpus = load_corpus(servers)
    data_spec = make_data_spec(corpus, servers)
    own = read(resolved(compose_config([*words, f"model.path={tmp_path}/1"])))
    with pytest.raises(workers.UserError, match="not the federation's"):
        Worker(own, corpus, shares=share_out(corpus, own, 3), data_spec=data_spec)


def test_towers_work_no_more_than_prompts_ask_for(monkeypatch, train):
    """Text prompts alone: a run reads each picture once, and each step the class set once."""
    read_pictures, read_texts = [], []
    image, text = DualEncoder.pooled_image, DualEncoder.pooled_text

    def count_pictures(self, pixel_values, prompt=None):
        read_pictures.append(len(pixel_values))
        return image(self, pixel_values, prompt)

    def count_texts(self, words, prompt=None):
        read_texts.append((torch.is_grad_enabled(), len(words.ids)))
        return text(self, words, prompt)

    monkeypatch.setattr(DualEncoder, "pooled_image", count_pictures)
    monkeypatch.setattr(DualEncoder, "pooled_text", count_texts)
    words = [
        "strategy.modalities=text",
        "client.local_steps=2",
        "dataset.client_validation=0",
        "eval_every=9",
    ]
    run = train(*WORDS, *words, small=False)
    rows = workers_of(*words)
    assert sum(read_pictures) == 2 * (len(rows.corpus.train) + len(rows.corpus.test))  # the run's, and these
    assert {count for _, count in read_texts} == {10}
    assert sum(learning for learning, _ in read_texts) == 2 * 3 * 2
    assert run.rows[-1]["clients_failed"] == 0


def test_a_worker_with_prompts_serves_one_run():
    """Another seed means other fresh prompts to measure from, and here also other encoders."""
    assert not workers_of().can_switch_to(read(resolved(compose_config([*WORDS, "seed=1"]))))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["strategy.fusion=blend"], "strategy.fusion=blend is unknown: choose one of cross, sum, concat."),
        (["strategy.prompts=none"], "set num_rounds=0"),
        (["strategy.mu=0.1"], "needs strategy.prompts=global"),
        (["strategy.text_tokens=0"], "strategy.text_tokens=0 must be at least 1"),
        (["strategy.template=hello"], "has no {} for the class name"),
        (["model=vit_tiny"], "no dual encoder"),
        (["strategy.heads=7"], "does not divide"),
        (["strategy.text_tokens=90"], "lower strategy.text_tokens"),
    ],
)
def test_bad_settings_are_one_sentence(overrides, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    late = told in ("does not divide", "lower strategy.text_tokens")  # said once the model is there
    assert command([*(WORDS if late else ["strategy=pfeddc"]), *overrides]) == 2
    assert told in capsys.readouterr().err


def test_promptfl_with_fedprox_pulls(train):
    words = ["strategy.prompts=global", "strategy.modalities=text", "num_rounds=1", "client.local_epochs=3"]
    free = train(*WORDS, *words, folder="free", small=False)
    pulled = train(*WORDS, *words, "strategy.mu=5", folder="pulled", small=False)
    assert pulled.rows[1]["drift"]["rest"]["mean_update"] < free.rows[1]["drift"]["rest"]["mean_update"]


def test_a_site_s_private_arrays_are_on_its_disk(tmp_path):
    words = [*WORDS, "num_clients=1", "partition=iid", "num_rounds=1"]
    node = {"site": "north", "cache-dir": str(tmp_path / "cache")}
    grid = wired(words, [node], num_clients=1)
    context = grid.contexts[1]
    forget_process()
    worker = workers_of("num_clients=1", "partition=iid")
    names = tuple(n for n in worker.exchanged if not n.endswith(".global"))
    request = TrainRequest(1, Plan((), (), names), {})
    first = kept_arrays(context, worker, request)
    changed = {name: value + 1 for name, value in first.items()}
    keep_private(context, changed, local=False)
    assert same_bits(to_tensors(context.state["private"]), changed)
    del context.state["private"]  # a new process: Flower's state is gone
    assert same_bits(kept_arrays(context, worker, request), changed)


def test_private_arrays_go_on_where_the_model_is():
    """A checkpoint's arrays lie on the host, wherever the model is: "meta" stands for another device."""
    own = {"prompts.text.local": torch.ones(2)}
    context = wired(WORDS, [{"partition-id": 0}], num_clients=1).contexts[1]
    context.state["private"] = to_record(own, local=True)
    elsewhere = SimpleNamespace(device=torch.device("meta"))
    (found,) = kept_arrays(context, elsewhere, TrainRequest(1, Plan((), (), tuple(own)), {})).values()
    assert found.device == elsewhere.device


# What is in a message, in every runtime --------------------------------------------------------------------


def nothing_private_in(folder, clients=3, rounds=2):
    """Names: global prompts alone. Bytes: nothing that a client kept is anywhere in any message."""
    kept, messages = read_all(folder / "kept"), read_all(folder / "messages")
    private = {f"prompts.{tower}.local" for tower in FLOATS}
    private |= {f"fusion.{t}.{part}.weight" for t in FLOATS for part in ("query", "key", "value", "output")}
    assert {name for name, _ in kept} == private and len(kept) == clients * rounds * len(private)
    trains = [about for about, _ in messages if about["type"] == "train"]
    assert {name for about in trains for name in about["names"]} == {
        "prompts.text.global",
        "prompts.vision.global",
    }
    # Down and up in every round; the judging goes down once more and brings back figures alone.
    assert sorted(len(about["names"]) for about in trains) == [0] * clients + [2] * clients * (2 * rounds + 1)
    assert not any(about["names"] for about, _ in messages if about["type"] != "train")
    for _, payload in messages:
        assert not any(content in payload for _, content in kept)


@pytest.mark.parametrize("runner", ["sequential", "cohort"])
@pytest.mark.slow
def test_no_message_in_process_holds_a_private_array(train, tmp_path, monkeypatch, runner):
    watch(tmp_path, monkeypatch.setattr)
    train(*WORDS, "personal=true", f"runtime.runner={runner}", small=False)
    nothing_private_in(tmp_path)


@pytest.mark.slow
def test_no_message_between_processes_holds_a_private_array(tmp_path, monkeypatch):
    """Arrays as bytes and the real ClientApp, as Flower's nodes run it."""
    watch(tmp_path, monkeypatch.setattr)
    words = [*WORDS, "personal=true", f"++runtime.cache_dir={tmp_path}/cache"]
    grid = wired(words, [{"partition-id": number, "num-partitions": 3} for number in range(3)])
    forget_process()
    composed = compose_run(words)
    worker = workers_of()
    connection = connect(grid, worker.roles, data_spec=worker.data_spec)
    summary = federate(Job(composed, tmp_path / "run"), connection, worker)
    assert summary["clients_failed"] == 0 and summary["personal"]["personal"]["mean"] > 0
    nothing_private_in(tmp_path)


@pytest.fixture
def sites(tmp_path, monkeypatch):
    monkeypatch.setattr("fedfrozen_app.report.output.write_curves", lambda *args, **kwargs: None)
    return with_prompts(tmp_path / "sites", "pfeddc", WORDS)


def test_no_message_of_a_deployed_site_holds_a_private_array(sites, tmp_path, monkeypatch):
    """The sites' own executors and policies answer; what they keep lies on their disks."""
    watch(tmp_path, monkeypatch.setattr)
    run = sites.train("personal=true")
    assert all(row["clients_failed"] == 0 for row in run.rows[1:])
    nothing_private_in(tmp_path)
    kept = {content for _, content in read_all(tmp_path / "kept")}
    for name in sites.names:
        (path,) = (sites.kit(name).var / "state" / "test").glob("*/2/private.safetensors")
        arrays = load_file(path)
        assert len(arrays) == 10 and all(raw_bytes(value) in kept for value in arrays.values())


@pytest.mark.slow  # tests/sites/test_executor.py does the same with strategy=local in the default run
def test_a_site_s_private_arrays_outlive_its_processes_and_a_round_asked_for_twice(sites):
    """The server dies after round 3, before its checkpoint; all processes start again: the same bits."""

    class Dies(SiteGrid):
        def push_messages(self, messages):
            messages = list(messages)
            if messages and messages[0].metadata.group_id == "4":
                raise KeyboardInterrupt
            return super().push_messages(messages)

    words = ["num_rounds=4", "client.local_steps=2", "checkpoint.every=1", "personal=false"]
    whole = sites.train(*words, "run_id=whole", folder="whole")
    with pytest.raises(KeyboardInterrupt):
        sites.train(*words, "run_id=broken", folder="broken", make_grid=Dies)
    shutil.rmtree(sites.folder / "broken" / "checkpoints" / "3")
    broken = sites.train(*words, "run_id=broken", folder="broken", resume=True)
    assert same_bits(whole.model, broken.model)
    for name in sites.names:
        state = sites.kit(name).var / "state"
        (one,), (other,) = ((state / run).glob("*/4/private.safetensors") for run in ("whole", "broken"))
        assert one.read_bytes() == other.read_bytes()


def test_a_deployed_site_takes_part_in_promptfl_with_fedprox(sites):
    words = ["strategy.prompts=global", "strategy.modalities=text", "strategy.mu=0.1", "num_rounds=1"]
    assert sites.train(*words).rows[1]["clients_ok"] == 3


@pytest.mark.slow
def test_no_message_of_flower_s_simulation_holds_a_private_array(tmp_path):
    """Ray's workers and a real SuperLink, with our apps watched from within."""
    app = tmp_path / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(PROJECT)
    shutil.copy(Path(__file__).with_name("watched.py"), app)
    settings = {"overrides": shlex.join([*WORDS, "personal=true"]), "output-dir": str(tmp_path / "run")}
    run_app(app, settings, num_supernodes=3, work_dir=tmp_path / "work")
    assert Run(tmp_path / "run").summary["clients_failed"] == 0
    nothing_private_in(tmp_path / "run")


@pytest.mark.slow
def test_flower_simulation_equals_one_process(train, tmp_path):
    one = train(*WORDS, "personal=true", folder="one", small=False)
    folder = tmp_path / "flower"
    words = [*WORDS, "personal=true", "runtime=flower", f"output_dir={folder}", f"hydra.run.dir={folder}"]
    assert command(words) == 0
    other = Run(folder)
    for row, twin in zip(one.rows, other.rows, strict=True):
        for key in ("bytes_up", "bytes_down", "bytes_up_by_role", "bytes_down_by_role", "clients"):
            assert row.get(key) == twin.get(key), key
    for name, value in one.model.items():
        torch.testing.assert_close(other.model[name], value, rtol=1e-4, atol=1e-6)
    mean = other.summary["personal"]["personal"]["mean"]
    assert mean == pytest.approx(one.summary["personal"]["personal"]["mean"], abs=0.05)


@pytest.mark.slow
def test_the_strategy_alone_runs_and_learns(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    assert command(["strategy=pfeddc", "num_rounds=4", f"hydra.run.dir={tmp_path}/run"]) == 0
    run = Run(tmp_path / "run")
    assert run.rows[0]["test_accuracy"] > 0.5 and run.rows[-1]["clients_failed"] == 0
    assert (tmp_path / "run" / "fairness.png").exists()
    assert run.rows[1]["bytes_up_by_role"] == {"prompt": 10 * (16 * 64 + 16 * 64) * 4}
