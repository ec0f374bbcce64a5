"""Whole private runs: what leaves a client, what is counted, and when it stops."""

import json
import math
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from flwr.app import Context, RecordDict
from safetensors import safe_open

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.exchange.messages import Reply, read_reply
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.train_request import NamedSettings, TrainRequest
from fedfrozen_app.handlers import request_check, train_handler
from fedfrozen_app.local import private, private_training
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.local.sequential import LocalResult
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.privacy.accountant import epsilon_of
from fedfrozen_app.privacy.budget import Budget, BudgetFile
from fedfrozen_app.privacy.noise import SecretNoise, SeededNoise
from fedfrozen_app.privacy.steps import Steps
from fedfrozen_app.privacy.vote import noisy_sum
from fedfrozen_app.server.aggregate import RunningMean
from fedfrozen_app.server.record import RoundRecord
from fedfrozen_app.server.sampling import participations
from tests.conftest import SMALL, same_bits, slowly
from tests.server.wire import run_wired

PRIVATE = ("privacy=dp_sgd", "privacy.seeded_noise=true", "client.local_steps=2")


@pytest.fixture
def replies(monkeypatch):
    """Every message that leaves a client, as the server reads it."""
    seen = []
    send = train_handler.train_reply

    def watch(message, reply, *, local):
        sent = send(message, reply, local=local)
        read = read_reply(sent)
        read.arrays = {name: value.clone() for name, value in read.arrays.items()}
        seen.append((message.metadata.dst_node_id - 1, read))
        return sent

    monkeypatch.setattr(train_handler, "train_reply", watch)
    return seen


def budget_of(run, client):
    found = BudgetFile(run.folder / "privacy", client).read()
    assert found is not None
    return found


@pytest.mark.parametrize("strategy", ["fedavg", *slowly("safl", "fedprox", "fedfrozen")])
def test_every_strategy_spends_what_was_allowed(train, strategy):
    run = train(f"strategy={strategy}", *PRIVATE, "num_rounds=2")
    last = run.rows[-1]
    assert last["clients_ok"] == 3 and last["private"] is False  # the noise was seeded
    assert last["epsilon_max"] == pytest.approx(8.0, rel=0.01) and last["epsilon_max"] <= 8.0
    assert run.rows[1]["epsilon_max"] < last["epsilon_max"] and last["privacy_unit"] == "example"
    page = (run.folder / "report.html").read_text()
    assert "epsilon per example" in page and "Privacy spent per example" in page
    assert run.summary["epsilon"] == last["epsilon"] and set(last["epsilon"]) == {"0", "1", "2"}
    for client in ("0", "1", "2"):
        budget = budget_of(run, client)
        assert budget.rounds == 2 and budget.seeded
        assert last["epsilon"][client] == epsilon_of(budget.steps, budget.delta, "prv", 8.0)


@pytest.mark.parametrize("strategy", ["fedavg", "safl"])
def test_a_reply_holds_noised_arrays_and_declared_numbers_only(train, replies, strategy):
    run = train(f"strategy={strategy}", *PRIVATE, "num_rounds=1", "privacy.examples=50")
    assert len(replies) == 3
    for _, reply in replies:
        assert set(reply.metrics) == {"epsilon", "delta"}
        assert reply.examples == 50
    row = run.rows[-1]
    assert not {"train_loss", "client_val_after", "layer_scores"} & set(row)
    # Losses, and the scores by layer and head that layers were chosen by, are on the site's own disk.
    noted = {}
    for line in (run.folder / "privacy" / "0.jsonl").read_text().splitlines():
        noted |= json.loads(line)
    assert "train_loss" in noted and ("head_scores" in noted) == (strategy == "safl")
    if strategy == "safl":
        scores = torch.tensor(noted["head_scores"])
        assert scores.ndim == 2 and (scores > 0).all() and (scores < 1).all()


@pytest.mark.slow
def test_pruning_comes_after_the_noise(train, replies):
    """What is sent of a pruned array are noised values, those that noise and all moved furthest."""
    words = ["strategy=safl", *PRIVATE, "privacy.examples=50"]
    start = train(*words, "num_rounds=0", folder="start").model
    train(*words, "num_rounds=1", folder="whole")
    train(*words, "num_rounds=1", "strategy.keep=0.5", folder="pruned")
    whole, pruned = replies[0][1].arrays, replies[3][1].arrays
    bits = np.unpackbits(pruned["mask"].numpy())
    place = 0
    for name, values in pruned.items():
        if name == "mask" or values.shape == whole[name].shape:
            continue
        mask = torch.from_numpy(bits[place : place + whole[name].numel()]).bool()
        place += len(mask)
        assert torch.equal(values, whole[name].flatten()[mask])
        moved = (whole[name] - start[name]).abs().flatten()
        assert moved[mask].min() >= moved[~mask].max()
    assert place > 1000


def test_noise_is_on_every_trained_array_and_on_no_frozen_one(train, replies):
    train("strategy=fedfrozen", "strategy.warmup_rounds=1", *PRIVATE, "num_rounds=2")
    later = [reply for _, reply in replies[3:]]
    assert later and all(".q_proj" not in name and ".query" not in name for r in later for name in r.arrays)
    one, other = later[0].arrays, later[1].arrays
    # Noise differs from client to client in every element.
    assert all(not torch.eq(one[name], other[name]).any() for name in one)


@pytest.mark.slow
def test_a_client_s_noise_is_solved_for_its_own_rounds(train):
    run = train("strategy=fedavg", *PRIVATE, "num_rounds=4", "participation=0.67", "num_clients=3")
    counts = {client: sum(client in row["clients"] for row in run.rows[1:]) for client in "012"}
    assert len(set(counts.values())) > 1  # two of three are drawn a round
    for client, count in counts.items():
        budget = budget_of(run, client)
        assert budget.rounds == count
        assert epsilon_of(budget.steps, budget.delta, "prv", 8.0) == pytest.approx(8.0, rel=0.01)


def test_with_the_budget_spent_nothing_more_is_sent(train, replies):
    run = train("strategy=fedavg", *PRIVATE, "num_rounds=1", "client.lr_schedule=constant")
    spent = {client: budget_of(run, client) for client in "012"}
    before = run.model
    replies.clear()
    again = train("strategy=fedavg", *PRIVATE, "num_rounds=2", "client.lr_schedule=constant", resume=True)
    assert [len(reply.arrays) for _, reply in replies] == [0, 0, 0]
    assert all("declines: of its privacy budget of epsilon 8 per example" in r.declined for _, r in replies)
    row = again.rows[-1]
    assert row["clients_ok"] == 0 and "declines" in row["failures"][0]
    assert row["epsilon_max"] == pytest.approx(8.0, rel=0.01)
    assert same_bits(before, again.model)
    assert {client: budget_of(again, client) for client in "012"} == spent


@pytest.mark.slow
def test_a_repeated_round_resends_the_stored_reply_or_pays_again(train, replies):
    """The server dies after a round and goes on from the checkpoint before it: the same order comes again."""
    words = ["strategy=fedavg", "privacy=dp_sgd", "client.local_steps=2"]
    run = train(*words, "num_rounds=2")
    first = dict(replies[3:])
    spent = budget_of(run, "0")
    (run.folder / "privacy" / "1.safetensors").unlink()  # client 1 lost its copy
    for path in sorted((run.folder / "checkpoints" / "2").iterdir()):
        path.unlink()
    (run.folder / "checkpoints" / "2").rmdir()
    replies.clear()
    train(*words, "num_rounds=2", resume=True)
    second = dict(replies)
    assert same_bits(first[0].arrays, second[0].arrays) and budget_of(run, "0") == spent
    # Client 1 would have to pay again, and has nothing left.
    assert not second[1].arrays and "declines" in second[1].declined


def test_an_order_is_the_same_whoever_came_first():
    """Flower names its nodes at random in every run: a resumed round must find the replies that were kept."""
    requests = [
        TrainRequest(1, Plan.full(["w"]), {}, participations=participations(names, 0.5, 0, 8))
        for names in (("0", "1", "2", "10"), ("10", "2", "0", "1"))
    ]
    assert requests[0].digest == requests[1].digest


def test_a_client_that_dies_has_paid(train, monkeypatch, tmp_path):
    def die(*args, **kwargs):
        raise RuntimeError("power cut")

    monkeypatch.setattr(private_training, "train_steps", die)
    with pytest.raises(RunFailed, match="power cut"):
        train("strategy=fedavg", *PRIVATE, "num_rounds=1")
    assert sum(step.times for step in BudgetFile(tmp_path / "run" / "privacy", "0").read().steps) == 2


def attending(folder, *words):
    """A client of one's own making: for a round, what takes part in it and what it starts from."""
    given = [*SMALL, "strategy=safl", *PRIVATE, "strategy.top_k=1", "num_clients=1", *words]
    config = read(resolved(compose_config(given)))
    corpus = load_corpus(config)

    def client(server_round):
        worker = Worker(config, corpus, shares=share_out(corpus, config, 1))
        plan, choice = Plan.full(worker.parameters), NamedSettings("attention", {"top_k": 1})
        request = TrainRequest(server_round, plan, {}, choice=choice, participations={"0": 4})
        return private.PrivateClient(worker, "0", request, folder), Start(worker.initial(), plan.trained)

    return client


@pytest.mark.parametrize(("unsent", "rounds"), [(True, 1), (False, 2)])
def test_training_that_was_killed_is_paid_for_again_unless_nothing_has_left(tmp_path, unsent, rounds):
    """A site knows that it sent nothing: it loses no round by a kill. Who does not know pays again."""
    client = attending(tmp_path, "privacy.selection=public")
    killed, start = client(1)
    steps = killed.coroutine(start)
    next(steps).run_alone()  # its payment
    steps.close()
    again, start = client(1)
    assert isinstance(again.take_part(start, unsent=unsent), LocalResult)
    record = BudgetFile(tmp_path, "0").read()
    assert record.rounds == rounds and len(record.steps) == rounds
    once_more, start = client(1)  # the reply is kept now
    once_more.take_part(start, unsent=unsent)
    other, start = client(2)  # another round is another payment
    other.take_part(start, unsent=unsent)
    assert BudgetFile(tmp_path, "0").read().rounds == rounds + 1


@pytest.mark.slow
def test_two_federations_at_once_both_pay(monkeypatch, tmp_path):
    """A site's record serves all its runs, and Flower may answer two of them at the same time."""
    client = attending(tmp_path, "privacy.selection_every=1")
    first, start = client(1)
    first.take_part(start)  # a record is there
    one, other = client(2), client(3)
    second = threading.Thread(target=lambda: other[0].take_part(other[1]))
    choose = private.choose_noisily

    def meanwhile(*args):
        if not second.ident:
            second.start()
            second.join(timeout=1)
        return choose(*args)

    monkeypatch.setattr(private, "choose_noisily", meanwhile)
    one[0].take_part(one[1])
    second.join()
    record = BudgetFile(tmp_path, "0").read()
    assert record.rounds == 3 and sum(step.times for step in record.steps) == 3 * (2 + 1)


@pytest.mark.slow
def test_a_record_is_read_at_the_smaller_delta(tmp_path):
    """A run that promises 1e-6 must not count what was spent before, or what it spends, at 1e-5."""
    one, start = attending(tmp_path)(1)
    assert one.take_part(start).metrics["delta"] == 1e-5
    other, start = attending(tmp_path, "privacy.delta=1e-6")(2)
    spent, record = other.take_part(start).metrics, BudgetFile(tmp_path, "0").read()
    assert spent["delta"] == record.delta == 1e-6
    at = {delta: epsilon_of(record.steps, delta, "prv", 8.0) for delta in (1e-6, 1e-5)}
    assert spent["epsilon"] == at[1e-6] > at[1e-5]
    again, start = attending(tmp_path, "privacy.delta=1e-4")(2)  # the same order: what was sent is sent again
    assert again.take_part(start).metrics == spent


@pytest.mark.slow
def test_layers_of_another_run_s_model_are_chosen_anew(tmp_path):
    file = BudgetFile(tmp_path, "0")
    one, start = attending(tmp_path, "privacy.selection_every=4")(1)
    one.take_part(start)
    file.write(replace(file.read(), layers=[5]))  # a run before this one had six layers, and this has two
    other, start = attending(tmp_path, "privacy.selection_every=4")(2)
    result = other.take_part(start)
    assert isinstance(result, LocalResult) and file.read().layers in ([0], [1])


@pytest.mark.slow
def test_os_noise_differs_between_runs_and_seeded_noise_repeats(train):
    words = ["strategy=fedavg", *PRIVATE, "num_rounds=1"]
    one, two = train(*words, folder="one"), train(*words, folder="two")
    assert same_bits(one.model, two.model)
    free = [*words, "privacy.seeded_noise=false"]
    three, four = train(*free, folder="three"), train(*free, folder="four")
    assert not same_bits(three.model, four.model)
    assert "private" not in three.rows[-1] and three.summary["private"] is True
    assert one.summary["private"] is False
    for file in ("model.safetensors", "best.safetensors", "checkpoints/1/model.safetensors"):
        with safe_open(one.folder / file, "pt") as opened:
            assert "NOT PRIVATE" in opened.metadata()["privacy"]
    with safe_open(three.folder / "model.safetensors", "pt") as opened:
        assert opened.metadata()["privacy"] == "epsilon at most 8 per example, for each client"


@pytest.mark.slow
def test_dropout_is_no_function_of_the_seed(train, monkeypatch):
    """Masks go by a row's place in the sample. Whoever knew them would see every row behind a new one change,
    not one gradient of norm C. Here all rows are in every sample and noise is off: only masks can differ."""
    for source in (SeededNoise, SecretNoise):
        monkeypatch.setattr(source, "added_to", lambda self, value, std: value)
    words = ["strategy=fedavg", *PRIVATE, "num_rounds=1", "client.batch_size=1000"]
    words += ["model.config.hidden_dropout_prob=0.5", "num_clients=1", "partition=iid", "dataset.limit=40"]
    one, two = train(*words, folder="one"), train(*words, folder="two")
    assert same_bits(one.model, two.model)  # the noise was seeded, and says so
    free = [*words, "privacy.seeded_noise=false"]
    three, four = train(*free, folder="three"), train(*free, folder="four")
    assert not same_bits(three.model, four.model)


def test_dropout_on_a_cpu_takes_more_than_the_32_bits_of_a_torch_seed():
    before = torch.default_generator.get_state()
    source = SeededNoise(torch.device("cpu"), 0, "0", 1)
    with source.dropout():
        drawn = torch.empty(700, dtype=torch.int64).random_(0, 2**32).tolist()
        again = torch.default_generator.initial_seed()
    assert torch.equal(torch.default_generator.get_state(), before)
    assert (
        drawn
        != torch.empty(700, dtype=torch.int64)
        .random_(0, 2**32, generator=torch.Generator().manual_seed(again))
        .tolist()
    )


def test_ghost_clipping_trains_one_after_another_with_a_line(train, caplog):
    caplog.set_level("INFO")
    words = (*PRIVATE, "num_rounds=1", "runtime.runner=cohort", "privacy.clipping=ghost")
    train("strategy=safl", "strategy.select=none", *words)
    assert "one after another on cpu (the sequential runner), because privacy.clipping=ghost" in caplog.text


def test_what_cannot_be_private_is_refused(train):
    with pytest.raises(UserError, match="keeps parts of the model on the client"):
        train("strategy=local", *PRIVATE, "num_rounds=1")
    words = ("personal=true", "client.class_weights=true", "client.clip=0.5", "model.dtype=bfloat16")
    for word in (*words, "privacy.epsilon=0"):
        with pytest.raises(UserError, match=word.split("=")[0]):
            train(*PRIVATE, word)
    with pytest.raises(UserError, match="no column 'patient'"):
        train(*PRIVATE, "privacy.unit=patient", "num_rounds=1")


def test_a_private_client_is_not_judged_whoever_asks(train, monkeypatch):
    """A server that asks for it all the same is told no."""
    monkeypatch.setattr("fedfrozen_app.config.checks.check_private", lambda config: None)
    run = train("strategy=fedavg", *PRIVATE, "num_rounds=1", "personal=true")
    assert json.loads((run.folder / "personal.json").read_text())["clients"] == []


def test_a_damaged_record_is_never_a_fresh_budget(tmp_path):
    file = BudgetFile(tmp_path, "0")
    assert file.read() is None
    file.write(Budget("0", "example", 1e-5, 10, 1.0, steps=[Steps(1.0, 0.1, 5)]))
    assert BudgetFile(tmp_path, "0").read().steps == [Steps(1.0, 0.1, 5)]
    (tmp_path / "0.json").write_text('{"format": 1, "steps": [[1.0')
    with pytest.raises(UserError, match="what was spent is unknown"):
        file.read()


@pytest.mark.slow
def test_a_run_goes_on_from_what_another_has_spent(train):
    words = ["strategy=fedavg", *PRIVATE]
    first = train(*words, "num_rounds=1", folder="first")
    start = f"from={first.folder / 'checkpoints' / '1'}"
    second = train(*words, "num_rounds=2", start, folder="second")
    assert budget_of(second, "0") == budget_of(first, "0")  # nothing was left: it declined
    assert second.rows[-1]["clients_ok"] == 0


def test_a_model_that_saw_the_data_without_noise_is_no_start(train):
    plain = train("strategy=fedavg", "num_rounds=1", folder="plain")
    with pytest.raises(UserError, match="a run with privacy=none on the same data"):
        train("strategy=fedavg", *PRIVATE, f"from={plain.folder / 'checkpoints' / '1'}", folder="private")


def test_a_smaller_dataset_is_still_the_same_data(train):
    plain = train("strategy=fedavg", "num_rounds=1", folder="plain")
    start = f"from={plain.folder / 'checkpoints' / '1'}"
    with pytest.raises(UserError, match="a run with privacy=none on the same data"):
        train("strategy=fedavg", *PRIVATE, start, "dataset.limit=150", folder="private")


@pytest.mark.slow
def test_rows_that_are_spent_are_not_dealt_to_clients_without_a_record(train):
    """Client 3 of four would have a fresh budget for rows of which three clients have spent all."""
    words = ["strategy=fedavg", *PRIVATE, "num_rounds=1"]
    first = train(*words, folder="first")
    start = f"from={first.folder / 'checkpoints' / '1'}"
    for word, key in (
        *(("num_clients=4", "num_clients"), ("seed=1", "seed"), ("partition.alpha=9", "partition")),
        ("dataset.limit=150", "dataset"),
    ):
        with pytest.raises(UserError, match=f"to other clients \\({key} differ"):
            train(*words, "num_rounds=2", start, word, folder="second")


def test_a_lost_record_is_no_fresh_budget(train, tmp_path):
    """Neither where a run goes on, nor where a checkpoint was copied without what lies beside it."""
    words = ["strategy=fedavg", *PRIVATE]
    run = train(*words, "num_rounds=1")
    shutil.copytree(run.folder / "checkpoints", tmp_path / "copy" / "checkpoints")
    (run.folder / "privacy" / "1.json").unlink()
    start = f"from={tmp_path / 'copy' / 'checkpoints' / '1'}"
    with pytest.raises(UserError, match=r"client 1 has spent .* no record .*run/privacy"):
        train(*words, "num_rounds=2", resume=True)
    with pytest.raises(UserError, match=r"client 0 has spent .* no record .*copy/privacy"):
        train(*words, "num_rounds=2", start, folder="fork")


@pytest.mark.slow
def test_a_client_that_moves_to_a_machine_without_its_record_spends_nothing_there(tmp_path, monkeypatch):
    """As on a Ray cluster whose machines share no folder: there its epsilon would begin at 0 again."""

    def move(server_round):
        monkeypatch.setenv("FLWR_HOME", str(tmp_path / f"machine {server_round % 2}"))

    with pytest.raises(UserError, match=r"Client 0 has paid for 1 rounds.* knows of 0.* machines share"):
        run_wired(tmp_path, move, extra=["strategy=fedavg", *PRIVATE])
    assert not list((tmp_path / "machine 0").rglob("*.json"))


@pytest.mark.parametrize("weak", ["privacy.seeded_noise=true", "privacy.selection=unaccounted"])
@pytest.mark.slow
def test_what_was_not_private_does_not_become_so(train, weak):
    """Round 1 has no privacy that epsilon covers, so a run that goes on from it has none to claim."""
    words = ["strategy=safl", "privacy=dp_sgd", "client.local_steps=1", "strategy.top_k=1"]
    run = train(*words, weak, "num_rounds=1")
    with pytest.raises(UserError, match=f"a run with {weak} on the same data"):
        train(*words, "num_rounds=2", resume=True)
    with safe_open(run.folder / "model.safetensors", "pt") as file:
        assert "epsilon" not in file.metadata()["privacy"] or "not the choice" in file.metadata()["privacy"]


def test_no_less_can_be_claimed_than_is_spent(train):
    train("strategy=fedavg", *PRIVATE, "num_rounds=1")
    with pytest.raises(UserError, match=r"privacy.epsilon=2 is less than the 8\.000 that a client has spent"):
        train("strategy=fedavg", *PRIVATE, "num_rounds=2", "privacy.epsilon=2", resume=True)


def test_a_reply_that_is_set_aside_was_paid_for_all_the_same():
    record = RoundRecord(1, RunningMean({"w": torch.zeros(2)}, lambda name: "rest"))
    sent = Reply("order", 5, {"w": torch.full((2,), math.nan)}, {"epsilon": 3.0, "delta": 1e-5})
    assert not record.take("north", sent)
    assert record.row("train", ["north"], 2, {})["epsilon"] == {"north": 3.0}


def test_a_site_that_gives_nothing_declines(train, monkeypatch, replies):
    real = private.PrivateClient.__init__

    def at_the_limit(self, *args, **more):
        real(self, *args, **(more | {"limit": 0.0}))

    monkeypatch.setattr(private.PrivateClient, "__init__", at_the_limit)
    with pytest.raises(RunFailed, match="declines: of its privacy budget of epsilon 0"):
        train("strategy=fedavg", *PRIVATE, "num_rounds=1")
    assert all(not reply.arrays for _, reply in replies)


@pytest.mark.parametrize("epsilon", ["inf", "1e6", "1e-5"])
def test_budgets_no_accountant_can_reckon_with_are_one_sentence(epsilon):
    with pytest.raises(UserError, match=r"privacy.epsilon=.* is out of range"):
        read(resolved(compose_config(["privacy=dp_sgd", f"privacy.epsilon={epsilon}"])))


@pytest.mark.slow
def test_a_site_may_insist_on_privacy():
    def at(overrides, **node):
        config = read(resolved(compose_config(overrides)))
        context = Context(0, 1, {"site": "a", **node}, RecordDict(), {})
        return request_check.refusal(context, config, TrainRequest(1, Plan((), (), ()), {}))

    assert at(["privacy=none"]) == ""
    assert "declines" in at(["privacy=none"], **{"max-epsilon": 4.0})
    assert "declines" in at(["privacy=dp_sgd", "privacy.seeded_noise=true"], **{"max-epsilon": 4.0})
    assert "declines" in at(["privacy=dp_sgd", "privacy.selection=unaccounted"], **{"max-epsilon": 4.0})
    assert at(["privacy=dp_sgd"], **{"max-epsilon": 4.0}) == ""


# Choosing layers --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_choice_of_layers_is_paid_for_every_few_rounds(train):
    run = train("strategy=safl", *PRIVATE, "num_rounds=3", "privacy.selection_every=2")
    budget = budget_of(run, "0")
    choices = [step for step in budget.steps if step.noise == budget.selection_noise]
    assert [step.times for step in choices] == [1, 1] and choices[0].rate == 0.25
    share = epsilon_of(choices, budget.delta, "prv", 0.8)
    assert share == pytest.approx(0.8, rel=0.01)
    chosen = [row["selection"]["0"] for row in run.rows[1:]]
    assert chosen[0] == chosen[1]
    assert run.rows[-1]["epsilon_max"] == pytest.approx(8.0, rel=0.01)


@pytest.mark.slow
def test_twenty_rounds_of_changing_layers_cost_what_an_independent_accountant_says(train):
    words = ["privacy.selection_every=3", "privacy.examples=50", "eval_every=20"]
    run = train("strategy=safl", *PRIVATE, "num_rounds=20", *words)
    assert len({tuple(row["selection"]["0"]) for row in run.rows[1:]}) > 1
    budget = budget_of(run, "0")
    assert len(budget.steps) == 20 + 7  # a choice in every third round
    google = PLDAccountant(value_discretization_interval=1e-3)
    for noise, rate, times in budget.steps:
        google.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), times)
    assert run.rows[-1]["epsilon"]["0"] == pytest.approx(google.get_epsilon(budget.delta), rel=0.01)


@pytest.mark.parametrize("way", ["public", "unaccounted"])
@pytest.mark.slow
def test_other_ways_to_choose_cost_nothing(train, way, caplog):
    run = train("strategy=safl", *PRIVATE, "num_rounds=1", f"privacy.selection={way}")
    budget = budget_of(run, "0")
    assert budget.selection_noise is None and len(budget.steps) == 1
    assert ("epsilon does not cover" in caplog.text) == (way == "unaccounted")


def test_noisy_sums_are_bounded_and_noised():
    source = SeededNoise(torch.device("cpu"), 0, "0", 1)
    # By hand: (1, 0, 2) less its mean is (0, -1, 1), of norm √2; (0.2, 0.1, 0) gives (0.1, 0, -0.1).
    scores = torch.tensor([[1.0, 0.0, 2.0], [0.2, 0.1, 0.0]])
    total = noisy_sum(scores, 0.0, source)
    assert total.tolist() == pytest.approx([0.1, -1 / math.sqrt(2), 1 / math.sqrt(2) - 0.1])
    far = torch.tensor([[1e6, -1e6, 0.0]])
    assert float((noisy_sum(torch.cat([scores, far]), 0.0, source) - total).norm()) == pytest.approx(1.0)
    broken = torch.tensor([[math.nan, 0.0, 1.0], [math.inf, 0.0, 1.0]])  # under weights that overflow
    assert torch.equal(noisy_sum(torch.cat([scores, broken]), 0.0, source), total)
    sums = torch.stack([noisy_sum(scores, 5.0, source) for _ in range(2000)])
    assert float(sums.std()) == pytest.approx(5.0, rel=0.05)
    assert noisy_sum(torch.zeros(0, 3), 1.0, source).shape == (3,)  # an empty sample is noise alone
