"""pFedDC as a whole: what travels, what stays, what is learned, with a tiny random CLIP."""

import pytest
import torch
from torch.nn import functional
from transformers import CLIPConfig, CLIPModel

from fedfrozen_app import client_app
from fedfrozen_app.__main__ import run as command
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.exchange.arrays import to_tensors
from fedfrozen_app.exchange.conversation import Conversation
from fedfrozen_app.runtime import checkpoint
from fedfrozen_app.runtime import resident as residents
from fedfrozen_app.runtime.inprocess import run_in_process
from fedfrozen_app.runtime.private import keep_private, private_arrays
from fedfrozen_app.runtime.resident import Resident
from fedfrozen_app.runtime.sequential import batches
from fedfrozen_app.server_app import federate
from tests.conftest import Run, same_bits
from tests.runtime.test_wire import forget_process, wired
from tests.strategies.dual import CLIP, TEXT_TOKENS, TEXT_WIDTH, VISION_TOKENS, VISION_WIDTH, WORDS

FLOATS = {"text": TEXT_TOKENS * TEXT_WIDTH, "vision": VISION_TOKENS * VISION_WIDTH}


def residents_of(*words):
    config = read(resolved(compose_config([*WORDS, *words])))
    corpus = load_corpus(config)
    return Resident(config, corpus, shares=share_out(corpus, config, config.num_clients))


def prompts(run, tower, level="global"):
    return run.model[f"prompts.{tower}.{level}"]


@pytest.mark.parametrize(
    ("design", "floats"),
    [
        (["strategy.modalities=both"], FLOATS["text"] + FLOATS["vision"]),
        (["strategy.modalities=text"], FLOATS["text"]),
        (["strategy.modalities=vision", "strategy.depth=2"], 2 * FLOATS["vision"]),
        (["strategy.prompts=global"], FLOATS["text"] + FLOATS["vision"]),
        (["strategy.fusion=sum"], FLOATS["text"] + FLOATS["vision"]),
        (["strategy.fusion=concat"], FLOATS["text"] + FLOATS["vision"]),
        (["strategy.fusion_query=local"], FLOATS["text"] + FLOATS["vision"]),
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


def test_a_published_clip_s_prompts_are_80_kib():
    """16 + 16 tokens on ViT-B/16 CLIP's shape: 16·512 + 16·768 floats of 4 bytes."""
    config = CLIPConfig()
    tokens = 16 * config.text_config.hidden_size + 16 * config.vision_config.hidden_size
    assert tokens * 4 == 80 * 1024


def test_one_client_s_step_is_coop_s(train):
    """prompts=global, text only, one client: w − lr·∂loss, with the loss written out on CLIP's own parts."""
    words = ["strategy.prompts=global", "strategy.modalities=text", "num_clients=1", "partition=iid"]
    words += ["num_rounds=1", "client.local_steps=1", "client.momentum=0", "client.weight_decay=0"]
    run = train(*WORDS, *words, small=False)
    resident = residents_of(*words)
    clip = resident.model.backbone.model
    start = resident.initial()["prompts.text.global"].clone().requires_grad_(True)  # (1, tokens, width)
    (rows,) = batches(resident.rows("0").train, resident.config.client, 0, "0", 1)
    pixels = resident.corpus.train.inputs["pixel_values"][rows]
    labels = resident.corpus.train.labels[rows]

    names = [f"{name}." for name in resident.corpus.classes]
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
        pixel_values=resident.task.prepare({"pixel_values": pixels})["pixel_values"]
    )
    images = getattr(images, "pooler_output", images)
    cosine = functional.normalize(images, dim=-1) @ functional.normalize(torch.stack(texts), dim=-1).T
    functional.cross_entropy(clip.logit_scale.exp() * cosine, labels).backward()
    expected = start.detach() - 0.1 * start.grad
    assert start.grad.abs().max() > 1e-4
    torch.testing.assert_close(prompts(run, "text"), expected, rtol=1e-4, atol=1e-6)


def test_two_clients_global_prompts_are_averaged_by_rows(train, monkeypatch):
    sent = []
    real = client_app.train_reply

    def watch(message, reply, *, local):
        sent.append((reply.examples, {name: value.clone() for name, value in reply.arrays.items()}))
        return real(message, reply, local=local)

    monkeypatch.setattr(client_app, "train_reply", watch)
    run = train(*WORDS, "num_clients=2", "num_rounds=1", "personal=false", small=False)
    (n1, one), (n2, two) = sent
    assert n1 != n2 and set(one) == {"prompts.text.global", "prompts.vision.global"}
    for name, value in one.items():
        torch.testing.assert_close(run.model[name], (n1 * value + n2 * two[name]) / (n1 + n2))


def test_private_parts_stay_and_outlive_missed_rounds_and_a_restart(train, tmp_path):
    """Whoever is not drawn keeps its state bit by bit, and goes on from it with the newest global prompts."""
    words = ["num_rounds=7", "participation=0.4", "client.local_steps=2", "seed=11"]
    run = train(*WORDS, *words, small=False)
    drawn = [row["clients"] for row in run.rows[1:]]
    kept = {
        number: checkpoint.read(run.folder / "checkpoints" / str(number)).clients for number in range(1, 8)
    }
    for number, cohort in enumerate(drawn, start=1):
        for client in ("0", "1", "2"):
            now, then = kept[number].get(client), kept.get(number - 1, {}).get(client)
            if client in cohort:
                assert now is not None and (then is None or not same_bits(now, then))
            elif then is not None:
                assert same_bits(now, then)  # not there: nothing of it changes
    # Stopped after round 4 in the middle and resumed in another process's state: the same bits.
    part = train(*WORDS, *words, "num_rounds=4", folder="part", small=False)
    assert part.rows[-1]["round"] == 4
    config = resolved(compose_config([*WORDS, *words]))
    run_in_process(read(config), config, [*WORDS, *words], part.folder, checkpoint.newest(part.folder))
    assert same_bits(run.model, part.model)
    last = checkpoint.read(part.folder / "checkpoints" / "7").clients
    assert all(same_bits(kept[7][client], last[client]) for client in last)


@pytest.mark.parametrize(
    "design",
    ["both", pytest.param("text", marks=pytest.mark.slow), pytest.param("vision", marks=pytest.mark.slow)],
)
def test_cohort_equals_sequential(train, design):
    words = [f"strategy.modalities={design}", "model.dtype=float64", "client.fusion_lr=0.3", "personal=true"]
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


def test_an_idle_fusion_is_called_so(train):
    run = train(*WORDS, "client.fusion_lr=1e-9", "num_rounds=1", small=False)
    assert run.summary["fusion"]["state"] == "fusion inactive"
    run = train(*WORDS, "client.fusion_lr=20", "num_rounds=1", folder="more", small=False)
    assert run.summary["fusion"]["state"] == "fusion active"


def test_zero_shot_is_the_template_alone(train):
    run = train(*WORDS, "strategy.prompts=none", "num_rounds=0", "personal=true", small=False)
    assert run.rows[0]["test_accuracy"] == run.summary["final_test_accuracy"]
    personal = run.summary["personal"]
    assert personal["global"] == personal["personal"] and "after" not in personal
    resident = residents_of("strategy.prompts=none", "num_rounds=0")
    clip, texts = resident.model.backbone, resident.model.text_features()
    plain = clip.text(clip.sentences([f"a photo of a {name}." for name in resident.corpus.classes]))
    torch.testing.assert_close(texts, functional.normalize(plain, dim=-1))


def test_a_clip_from_a_local_folder_loads_and_trains(train, tmp_path):
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(**CLIP)).save_pretrained(tmp_path / "clip")
    words = [word for word in WORDS if "model." not in word]
    run = train(*words, "model=checkpoint", f"model.path={tmp_path}/clip", small=False)
    assert run.rows[-1]["clients_failed"] == 0 and run.rows[-1]["fusion_gap_text"] > 0


def test_encoders_that_differ_are_refused(tmp_path):
    """A node whose folder holds other weights learns so before it trains."""
    for seed in (0, 1):
        torch.manual_seed(seed)
        CLIPModel(CLIPConfig(**CLIP)).save_pretrained(tmp_path / str(seed))
    words = [word for word in WORDS if "model." not in word] + ["model=checkpoint"]
    servers = read(resolved(compose_config([*words, f"model.path={tmp_path}/0"])))
    corpus = load_corpus(servers)
    card = residents.make_card(corpus, servers)
    own = read(resolved(compose_config([*words, f"model.path={tmp_path}/1"])))
    with pytest.raises(residents.UserError, match="not the federation's"):
        Resident(own, corpus, shares=share_out(corpus, own, 3), card=card)


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
    resident = residents_of("num_clients=1", "partition=iid")
    names = tuple(n for n in resident.exchanged if not n.endswith(".global"))
    first = private_arrays(context, resident, names)
    changed = {name: value + 1 for name, value in first.items()}
    keep_private(context, changed, local=False)
    assert same_bits(to_tensors(context.state["private"]), changed)
    del context.state["private"]  # a new process: Flower's state is gone
    assert same_bits(private_arrays(context, resident, names), changed)


def test_no_message_holds_a_private_array(tmp_path, monkeypatch):
    """Arrays as bytes, the real ClientApp, every message in both directions looked at."""
    seen = []
    words = [*WORDS, "personal=true", f"runtime.cache_dir={tmp_path}/cache"]
    grid = wired(words, [{"partition-id": number, "num-partitions": 3} for number in range(3)])
    push, pull = grid.push_messages, grid.pull_messages

    def watch(messages):
        found = list(messages)
        seen.extend(name for m in found if "arrays" in m.content for name in m.content["arrays"])
        return found

    monkeypatch.setattr(grid, "push_messages", lambda messages: push(watch(messages)))
    monkeypatch.setattr(grid, "pull_messages", lambda ids: watch(pull(ids)))
    forget_process()
    plain = resolved(compose_config(words))
    resident = residents_of()
    talk = Conversation(grid, resident.roles, card=resident.card)
    summary = federate(read(plain), plain, words, talk, resident, tmp_path / "run")
    # Two rounds for three clients, down and up; the judging goes down once more and brings back figures.
    assert sorted(set(seen)) == ["prompts.text.global", "prompts.vision.global"]
    assert len(seen) == 2 * (2 * 3 * 2 + 3)
    assert summary["clients_failed"] == 0 and summary["personal"]["personal"]["mean"] > 0


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
