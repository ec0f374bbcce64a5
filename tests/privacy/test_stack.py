"""Private clients that take their steps together: the same numbers as one after another."""

import fcntl
import json
import time
from contextlib import suppress
from threading import Barrier, Semaphore, current_thread

import numpy as np
import pytest
import torch

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.block import Layout
from fedfrozen_app.local import private_noise, private_stack, private_sums, worker
from fedfrozen_app.privacy import accountant, budget
from fedfrozen_app.privacy.budget import BudgetFile
from fedfrozen_app.privacy.noise import SecretNoise
from fedfrozen_app.runtimes.inprocess import runtime
from fedfrozen_app.server.base import PlannedFedAvg
from tests.conftest import same_bits, slowly
from tests.privacy.bad_clients import reply_of, spoil_first_example

EXACT = ("model.dtype=float64", "privacy=dp_sgd", "privacy.seeded_noise=true", "num_rounds=2")
UNEQUAL = ("partition.alpha=0.3", "num_clients=4", "client.batch_size=8")


def difference(one, other):
    return max(float((one.model[name] - other.model[name]).abs().max()) for name in one.model)


@pytest.mark.parametrize(
    "words",
    [
        ("strategy=fedavg",),
        *slowly(
            ("strategy=safl", "strategy.top_k=1"),
            ("strategy=safl", "strategy.select=none"),
            ("strategy=fedprox", "client=sgd"),
            ("strategy=fedfrozen", "client.head_lr=0.01"),
            ("strategy=fedavg", "adapter=lora", "adapter.rank=2"),
            ("strategy=fedavg", "secure_aggregation=on"),
            (
                "strategy=fedavg",
                "model.config.hidden_size=64",
                "model.config.intermediate_size=64",
            ),  # no gaps
        ),
    ],
    ids=" ".join,
)
def test_together_is_one_after_another(train, words):
    own = (*EXACT, *UNEQUAL, "privacy.physical_batch=5", *words)
    alone = train(*own, "runtime.runner=sequential", folder="alone")
    both = train(*own, "runtime.runner=cohort", folder="both")
    assert difference(alone, both) <= 1e-9
    for row, twin in zip(alone.rows, both.rows, strict=True):
        for key in ("epsilon", "bytes_up", "bytes_down", "clients", "trained_params"):
            assert row.get(key) == twin.get(key), key
    for client in "0123":
        first, second = (losses_at(run.folder / "privacy" / f"{client}.jsonl") for run in (alone, both))
        assert len(first) == 2 and first == pytest.approx(second)


def test_the_layers_below_of_a_language_model_look_back_and_never_ahead(train, tmp_path):
    """Texts of one length, of which none is padded: no mask says so then."""
    texts = ["".join("abcdefgh"[number * step % 8] for step in range(1, 10)) for number in range(80)]
    lines = [json.dumps({"text": text, "label": "xy"[number % 2]}) for number, text in enumerate(texts)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    words = [*EXACT, "strategy=fedavg", "model=gpt2_tiny", "dataset=text", "dataset.max_tokens=9"]
    words += [f"dataset.path={tmp_path}/rows.jsonl", "adapter=lora", "adapter.rank=2", "adapter.layers=1"]
    words += ["num_clients=2", "client.batch_size=8", "num_rounds=1"]
    alone, both = (
        train(*words, f"runtime.runner={runner}", folder=runner, small=False)
        for runner in ("sequential", "cohort")
    )
    assert difference(alone, both) <= 1e-9


@pytest.mark.slow
def test_noise_that_is_drawn_early_is_the_same_noise(train, monkeypatch):
    """As on a GPU, by threads: every client's sample and noise still come from its generator in turn."""
    own = (*EXACT, *UNEQUAL, "strategy=fedavg", "privacy.physical_batch=5")
    alone = train(*own, "runtime.runner=sequential", folder="alone")
    monkeypatch.setattr(private_noise, "EARLY_ON", ("cpu",))
    both = train(*own, "runtime.runner=cohort", folder="both")
    assert difference(alone, both) <= 1e-9


SECRET = ("privacy=dp_sgd", "strategy=fedavg", "runtime.runner=cohort", "num_rounds=3")


def noted_noise(monkeypatch):
    """As on a GPU. Of each draw whose it is and what came out, and what was added to sums."""
    drawn, used, standards, add = [], [], SecretNoise.standards, SecretNoise.with_drawn

    def draws(sources, *given):
        drawn.append((sources, standards(sources, *given)))
        return drawn[-1][1]

    def adds(value, noise, std):
        used.append(noise)
        return add(value, noise, std)

    monkeypatch.setattr(private_noise, "EARLY_ON", ("cpu",))
    monkeypatch.setattr(SecretNoise, "standards", staticmethod(draws))
    monkeypatch.setattr(SecretNoise, "with_drawn", staticmethod(adds))
    return drawn, used


def test_secret_noise_is_drawn_ahead_and_used_once(train, monkeypatch):
    drawn, used = noted_noise(monkeypatch)
    begun, together = [], private_stack.together

    def looks(trainings, most, **named):
        if (threads := trainings[0].client.worker.kept.find(private_noise.Threads)) is not None:
            threads.pause()
        begun.append(len(drawn))
        return together(trainings, most, **named)

    monkeypatch.setattr(private_stack, "together", looks)
    train(*SECRET, *UNEQUAL)
    steps, ahead = len(used) // 3, private_noise.AHEAD
    assert steps > ahead and len(used) == 3 * steps
    assert begun == [0, steps + ahead, 2 * steps + ahead]  # the first of a round are there before it begins
    # In their order, each once, and none for a fourth round.
    assert all(noise is own for noise, (_, own) in zip(used, drawn, strict=True))
    keys = [source for sources, _ in drawn for source in sources]
    assert len({id(key) for key in keys}) == len(keys)  # nobody's noise has another's key
    assert len({len(sources) for sources, _ in drawn}) > 1  # clients grow fewer


def test_noise_that_was_drawn_for_others_is_not_used(train, monkeypatch):
    """In the second round a client fails: what was drawn for three does not fit two, nor theirs the third."""
    (drawn, used), write = noted_noise(monkeypatch), BudgetFile.write

    def fails(self, budget):
        if budget.client == "1" and budget.rounds == 2 and not failed:
            failed.append(budget)
            raise RuntimeError("its disk is gone")
        write(self, budget)

    failed = []
    monkeypatch.setattr(BudgetFile, "write", fails)
    run = train(*SECRET, "partition=iid", "client.batch_size=8", "client.local_steps=2")
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 2, 3]
    assert [len(noise) for noise in used] == [3, 3, 2, 2, 3, 3] and len(drawn) > len(used)
    assert len({id(noise) for noise in used}) == len(used)


def test_the_next_round_s_spending_is_known_before_it_begins(train, monkeypatch):
    """On a GPU: while it trains. The first round alone waits for the accountant."""
    asked, get_epsilon = [], accountant.PrvAccountant.get_epsilon

    def noted(self, *given, **named):
        asked.append(current_thread().name.partition("_")[0])
        return get_epsilon(self, *given, **named)

    monkeypatch.setattr(accountant.PrvAccountant, "get_epsilon", noted)
    accountant._epsilon.cache_clear()
    usual = train(*EXACT, "strategy=fedavg", "runtime.runner=cohort", "num_rounds=3", folder="usual")
    assert "accountant" not in asked
    waited = len(asked)
    accountant._epsilon.cache_clear()
    asked.clear()
    monkeypatch.setattr(private_noise, "EARLY_ON", ("cpu",))
    early = train(*EXACT, "strategy=fedavg", "runtime.runner=cohort", "num_rounds=3", folder="early")
    assert [row.get("epsilon") for row in early.rows] == [row.get("epsilon") for row in usual.rows]
    aside = asked.count("accountant")
    assert aside and len(asked) - aside < waited  # and one round more was looked at than came


@pytest.mark.slow
def test_samples_take_the_room_of_clients_that_are_not_there(train, monkeypatch):
    sizes = []
    each = private_sums.norms_of
    monkeypatch.setattr(
        private_sums, "norms_of", lambda *given: sizes.append(each(*given).shape[1]) or each(*given)
    )
    words = (*EXACT, *UNEQUAL, "strategy=fedavg", "runtime.runner=cohort", "privacy.physical_batch=2")
    runs = []
    for most in (4, 12):  # of four clients
        monkeypatch.setattr(private_stack, "clients_at_once", lambda *given, most=most: most)
        runs.append(train(*words, "num_rounds=1", folder=str(most)))
        assert max(sizes) == most // 2  # rows of a client: two for each of its places
        sizes.clear()
    monkeypatch.setattr(private_stack, "MOST_ROWS", 13)
    runs.append(train(*words, "num_rounds=1", folder="few"))
    assert max(sizes) == 3  # of each of four
    assert difference(*runs[1:]) <= 1e-12
    assert difference(*runs[:2]) <= 1e-12


def test_a_gpu_takes_private_steps_of_few_shapes():
    """Of eight clients or three, whose longest sample has so many rows."""
    assert [private_sums.padded(count, 61, 8, True) for count in (8, 5, 4, 3, 2, 1)] == [
        *((8, 64), (8, 64), (4, 64), (4, 64), (2, 64), (1, 64)),
    ]
    assert private_sums.padded(3, 65, 3, True) == (3, 72)  # as many as there are
    assert private_sums.padded(3, 61, 8, False) == (3, 61)


@pytest.mark.parametrize(
    ("on_gpu", "packs", "room"), [(False, True, 4), (True, True, 12), (True, False, 12), (False, False, 12)]
)
def test_rows_of_all_clients_are_one_after_another(on_gpu, packs, room):
    """Of samples of three rows, none and one, as four clients: where each is, and -1 where there is none."""
    samples = [np.array([7, 5, 9]), np.array([], dtype=np.int64), np.array([5])]
    numbers, shape = private_sums.packed(samples, 4, 3, on_gpu=on_gpu, packs=packs)
    assert shape == (4, 3, room)
    assert numbers[:12].reshape(4, 3).tolist() == [[0, 1, 2], [-1, -1, -1], [3, -1, -1], [-1, -1, -1]]
    assert numbers[12:].tolist() == [7, 5, 9, 5] + [0] * (room - 4)


def test_on_a_gpu_few_shapes_of_rows_together_serve_for_all():
    samples = [np.arange(length) for length in (60, 75, 64, 50, 70, 66, 61, 59)]  # 505 in all
    assert private_sums.packed(samples, 8, 80, on_gpu=True, packs=True)[1] == (8, 80, 512)
    assert private_sums.packed([*samples[:-1], np.arange(67)], 8, 80, on_gpu=True, packs=True)[1][2] == 576


@pytest.mark.parametrize(
    ("shapes", "has_gaps"), [(((2, 32), (64,), (10,)), False), (((10,), (2, 32)), True), (((),), False)]
)
def test_a_row_is_noised_where_its_numbers_are(shapes, has_gaps):
    arrays = {str(number): torch.randn(shape) for number, shape in enumerate(shapes)}
    layout = Layout.of(arrays)
    columns = private_sums._columns(layout, torch.device("cpu"))
    assert isinstance(columns, slice) != has_gaps
    numbers = torch.cat([value.reshape(-1) for value in arrays.values()])
    assert torch.equal(layout.flatten(arrays)[columns], numbers)


def losses_at(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["train_loss"] for line in lines if "train_loss" in line]


def test_others_start_where_a_watched_client_starts(train):
    """It trains the model that is loaded, by itself; and its canaries are drawn anew in every run."""
    own = (*EXACT, *UNEQUAL, "strategy=fedavg", "privacy.audited=1", "privacy.canaries=4", "num_rounds=1")
    runs = [train(*own, f"runtime.runner={runner}", folder=runner) for runner in ("sequential", "cohort")]
    for client in "023":
        one, other = (reply_of(run, client) for run in runs)
        assert all(float((one[name] - other[name]).abs().max()) <= 1e-9 for name in one)


def test_an_example_that_is_not_finite_gives_nothing(train, monkeypatch):
    """Of the whole round it takes its own part away, and nobody else's. A GPU never looks, and takes every
    step once; elsewhere such a step is taken again, with the same dropout."""
    seen = spoil_first_example(monkeypatch)
    runs, chunks = [], []
    for careful_on in ((), ("cpu",)):
        monkeypatch.setattr(private_sums, "CAREFUL_ON", careful_on)
        words = ("strategy=fedavg", "runtime.runner=cohort", "num_rounds=1", "privacy.physical_batch=5")
        words += ("model.config.hidden_dropout_prob=0.2",)
        runs.append(train(*EXACT, *words, folder=f"careful {careful_on}"))
        chunks.append(len(seen))
        seen.clear()
        # Also what each has sent: the server leaves out what is not finite.
        for arrays in (runs[-1].model, *(reply_of(runs[-1], client) for client in "012")):
            assert arrays and all(bool(torch.isfinite(value).all()) for value in arrays.values())
    assert chunks[0] == 2 * chunks[1] > 0 and same_bits(runs[0].model, runs[1].model)


@pytest.mark.parametrize("dtype", ["float64", *slowly("float32")])
def test_gradients_that_are_finite_lose_nothing_by_care(train, monkeypatch, dtype):
    words = (*EXACT, *UNEQUAL, f"model.dtype={dtype}", "strategy=fedavg", "runtime.runner=cohort")
    runs = []
    for careful_on in ((), ("cpu",)):
        monkeypatch.setattr(private_sums, "CAREFUL_ON", careful_on)
        runs.append(train(*words, "privacy.physical_batch=5", folder=f"careful {careful_on}"))
    assert same_bits(runs[0].model, runs[1].model)
    losses = [losses_at(run.folder / "privacy" / "0.jsonl") for run in runs]
    assert losses[0] == losses[1] and len(losses[0]) == 2


@pytest.mark.slow
def test_they_train_in_blocks_that_fit(train, monkeypatch):
    words = (*EXACT, *UNEQUAL, "strategy=fedavg", "runtime.runner=cohort")
    whole = train(*words, folder="whole")
    counts = []
    together = private_stack.together
    monkeypatch.setattr(
        private_stack,
        "together",
        lambda some, most, **named: counts.append(len(some)) or together(some, most, **named),
    )
    monkeypatch.setattr(private_stack, "clients_at_once", lambda *given: 3)
    small = train(*words, folder="small")
    assert counts == [3, 1, 3, 1] and difference(whole, small) <= 1e-12
    counts.clear()
    few = train(*words, "runtime.max_block=2", folder="few")
    assert counts == [2, 2, 2, 2] and difference(whole, few) <= 1e-12


@pytest.mark.parametrize("clipping", ["per_example", "ghost"])
def test_an_embedding_that_changes_by_what_it_reads_is_refused_before_anyone_pays(
    train, monkeypatch, clipping
):
    build = worker.Worker._build

    def limited(self, corpus):
        model = build(self, corpus)
        model.get_input_embeddings().max_norm = 1.0
        return model

    monkeypatch.setattr(worker.Worker, "_build", limited)
    paid = []
    monkeypatch.setattr(BudgetFile, "write", lambda *given: paid.append(given))
    words = ("strategy=safl", "strategy.select=none", f"privacy.clipping={clipping}")
    with pytest.raises(UserError, match="max_norm"):
        train(*EXACT, *words)
    assert not paid


def test_a_client_that_fails_leaves_the_others_alone(train, monkeypatch, caplog):
    write = BudgetFile.write

    def fails(self, budget):
        if budget.client == "1":
            raise RuntimeError("its disk is gone")
        write(self, budget)

    monkeypatch.setattr(BudgetFile, "write", fails)
    run = train(*EXACT, "strategy=fedavg", "runtime.runner=cohort", "num_rounds=1")
    assert run.rows[1]["clients_ok"] == 2 and run.rows[1]["clients_failed"] == 1
    assert "its disk is gone" in caplog.text


def test_clients_pay_beside_one_another_and_all_before_a_step_is_taken(train, monkeypatch):
    """A disk takes milliseconds with each. Here all three wait for one another: none may wait its turn."""
    write, together = BudgetFile.write, private_stack.together
    all_of_them, paid = Barrier(3), []

    def waits(self, budget):
        all_of_them.wait(timeout=60)
        write(self, budget)
        paid.append(budget.client)

    def looks(trainings, most, **named):
        assert len(paid) % 3 == 0 and {*paid[-3:]} == {training.client.client for training in trainings}
        return together(trainings, most, **named)

    monkeypatch.setattr(BudgetFile, "write", waits)
    monkeypatch.setattr(private_stack, "together", looks)
    run = train(*EXACT, "strategy=fedavg", "runtime.runner=cohort", "num_rounds=2")
    assert len(paid) == 6 and run.rows[-1]["clients_ok"] == 3


def test_an_answer_does_not_wait_for_the_disk_and_the_next_round_does(train, monkeypatch):
    """Here no reply is kept before the round's new model is there."""
    keeping, step, together = BudgetFile.keeping, PlannedFedAvg.step, private_stack.together
    merged, kept = Semaphore(0), []

    def keeps_later(self, *given, **named):
        keep = keeping(self, *given, **named)

        def waits():
            assert merged.acquire(timeout=60)
            keep()
            kept.append(self)

        return waits

    def steps(self, update):
        merged.release(3)
        return step(self, update)

    def looks(trainings, most, **named):
        assert len(kept) == 3 * (trainings[0].client.request.round - 1)
        return together(trainings, most, **named)

    monkeypatch.setattr(BudgetFile, "keeping", keeps_later)
    monkeypatch.setattr(PlannedFedAvg, "step", steps)
    monkeypatch.setattr(private_stack, "together", looks)
    run = train(*EXACT, "strategy=fedavg", "runtime.runner=cohort", "num_rounds=2")
    assert len(kept) == 6 and all(reply_of(run, client) for client in "012")


@pytest.mark.parametrize("error", [OSError, MemoryError])
def test_a_reply_that_cannot_be_kept_counts_and_is_said(train, monkeypatch, caplog, error):
    def full(*given):
        raise error("no room")

    monkeypatch.setattr(BudgetFile, "note", full)
    run = train(*EXACT, "strategy=fedavg", "runtime.runner=cohort", "num_rounds=2")
    said = f"could not keep its reply ({error.__name__}: no room)"
    assert run.rows[-1]["clients_ok"] == 3 and caplog.text.count(said) == 6


@pytest.fixture
def impatient(monkeypatch):
    """Whoever would wait for a lock for ever is told so."""

    def soon(file, how, flock=fcntl.flock):
        for _ in range(50):
            with suppress(BlockingIOError):
                return flock(file, how | fcntl.LOCK_NB)
            time.sleep(0.1)
        pytest.fail("a record stays locked")

    monkeypatch.setattr(budget.fcntl, "flock", soon)


@pytest.mark.usefixtures("impatient")
def test_after_steps_that_failed_the_next_round_goes_on(train, monkeypatch):
    """Whoever logs the error keeps its traceback, and with it all that it has seen."""
    step, taken = private_stack._Descent.step, []

    def fails(self, *given):
        taken.append(self)
        if len(taken) == 4:
            raise RuntimeError("the device is gone for a while")
        return step(self, *given)

    monkeypatch.setattr(private_stack._Descent, "step", fails)
    drawn, used = noted_noise(monkeypatch)
    run = train(*SECRET, "partition=iid", "client.batch_size=8", "client.local_steps=2", "num_rounds=4")
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 0, 3, 3]
    assert len({id(noise) for noise in used}) == len(used) == 7 and len(drawn) > len(used)


@pytest.mark.usefixtures("impatient")
def test_noise_that_could_not_be_drawn_between_rounds_costs_nobody_a_round(train, monkeypatch):
    """While the server judges its model, say, which takes the memory."""
    noted_noise(monkeypatch)
    standards, step, drawn = SecretNoise.standards, PlannedFedAvg.step, []

    def fails(*given):
        drawn.append(given)
        if len(drawn) == 3:
            raise torch.OutOfMemoryError("the device is full")
        return standards(*given)

    def waits(self, update):
        if threads := workers[0].kept.find(private_noise.Threads):
            threads.pause()
        return step(self, update)

    monkeypatch.setattr(SecretNoise, "standards", staticmethod(fails))
    monkeypatch.setattr(PlannedFedAvg, "step", waits)
    workers = noted_workers(monkeypatch)
    run = train(*SECRET, "partition=iid", "client.batch_size=8", "client.local_steps=2")
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 3, 3]


def noted_workers(monkeypatch):
    found, make = [], runtime.Worker
    monkeypatch.setattr(
        runtime, "Worker", lambda *given, **named: found.append(make(*given, **named)) or found[-1]
    )
    return found


def test_noise_for_a_round_that_never_comes_is_let_go(train, monkeypatch):
    drawn, used = noted_noise(monkeypatch)
    workers = noted_workers(monkeypatch)

    def stops(self, update):
        raise KeyboardInterrupt

    monkeypatch.setattr(PlannedFedAvg, "step", stops)
    with pytest.raises(KeyboardInterrupt):
        train(*SECRET, "client.local_steps=2")
    assert len(drawn) > len(used) and not workers[0].kept.find(private_noise.Threads)._started


@pytest.mark.usefixtures("impatient")
def test_alone_a_client_that_cannot_keep_its_reply_has_failed_and_goes_on(train, monkeypatch):
    note, tried = BudgetFile.note, []

    def full(self, *given):
        tried.append(self)
        if len(tried) <= 3:
            raise OSError("no room")
        note(self, *given)

    monkeypatch.setattr(BudgetFile, "note", full)
    run = train(*EXACT, "strategy=fedavg", "runtime.runner=sequential")
    assert [row["clients_ok"] for row in run.rows[1:]] == [0, 3]


def test_steps_that_fail_together_fail_their_clients(train, monkeypatch, caplog):
    def full(*given, **named):
        raise torch.OutOfMemoryError("the device is full")

    monkeypatch.setattr(private_stack, "together", full)
    with pytest.raises(Exception, match="the device is full"):
        train(*EXACT, "strategy=fedavg", "runtime.runner=cohort", "num_rounds=1")
