"""Whole runs with masks: the course of a run without, within the rounding that is said; what is refused."""

import json

import pytest
from flwr.app import Error, Message, MessageType

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.exchange.masking_messages import MASKING, masking_text
from fedfrozen_app.exchange.messages import read_reply
from fedfrozen_app.report.console import masked_facts
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid
from fedfrozen_app.secure import work
from tests.conftest import Run, same_bits
from tests.secure.runs import ON, PLAIN, far, within_rounding
from tests.strategies.dual import WORDS


def compare(train, *words: str, times: float = 1) -> tuple[Run, Run]:
    words = (*words, "checkpoint.keep=9")
    plain, masked = train(*words, folder="plain"), train(*words, ON, folder="masked")
    within_rounding(plain, masked, times)
    for one, other in zip(plain.rows[1:], masked.rows[1:], strict=True):
        assert other["clients_ok"] == one["clients_ok"] == len(one["clients"])
        assert other["train_loss"] == pytest.approx(one["train_loss"], abs=1e-3)
        assert other["effective_clients"] == pytest.approx(one["effective_clients"])
        assert other["secure"]["clipped"] == 0 and other["secure"]["summed"] == one["clients_ok"]
        for group, figures in one["drift"].items():
            assert other["drift"][group] == pytest.approx(figures, rel=1e-2, abs=1e-3)
        assert "by_client" not in other
    return plain, masked


def test_fedfrozen_across_the_switch(train):
    plain, masked = compare(train, "strategy.warmup_rounds=2", *PLAIN)
    frozen = [name for name in masked.model if ".q_proj" in name or "query" in name]
    assert frozen and same_bits(
        {n: masked.model_after(2)[n] for n in frozen}, {n: masked.model[n] for n in frozen}
    )
    # What travels: a number of 4 bytes for each weight, as before, by the same roles; and a head.
    for one, other in zip(plain.rows[1:], masked.rows[1:], strict=True):
        by_role = dict(other["bytes_up_by_role"])
        assert by_role.pop(work.MASKED) < 3_000
        assert by_role == one["bytes_up_by_role"]
    assert sum(masked.rows[3]["bytes_up_by_role"].values()) < sum(masked.rows[2]["bytes_up_by_role"].values())


def test_masked_clients_are_said_to_train_one_after_another(train, caplog):
    with caplog.at_level("INFO"):
        train(ON, "num_rounds=1", "runtime.runner=cohort")
    assert "Clients train one after another" in caplog.text
    assert "because each of them masks what it sends" in caplog.text and "together" not in caplog.text


@pytest.mark.slow
def test_scaffold_whose_other_arrays_are_masked_too(train):
    compare(train, "strategy=scaffold", "client.lr=0.05")


@pytest.mark.slow
def test_fednova_reads_its_steps_off_the_sum(train):
    """By which it multiplies the mean: fewer than four here."""
    compare(train, "strategy=fednova", "client.lr=0.05", "client.momentum=0", times=4)


@pytest.mark.slow
def test_feddyn_counts_every_client_alike(train):
    compare(train, "strategy=feddyn", *PLAIN)


@pytest.mark.slow
def test_layers_that_clients_choose_are_a_union_with_zeros(train):
    words = ("strategy=safl", "dataset=digits", "model=vit_tiny", "strategy.top_k=1", *PLAIN)
    words = (*words, "checkpoint.keep=9")
    plain, masked = train(*words, folder="plain"), train(*words, ON, folder="masked")
    within_rounding(plain, masked)
    for one, other in zip(plain.rows[1:], masked.rows[1:], strict=True):
        assert other["layer_scores"] == pytest.approx(one["layer_scores"], rel=1e-3)
        assert other["selection"] == {}  # who chose what is nobody's to know
        assert sum(other["bytes_up_by_role"].values()) > sum(one["bytes_up_by_role"].values())


@pytest.mark.slow
def test_pfeddc_sends_its_global_prompts_masked(train):
    words = (*WORDS, "num_rounds=2", "client.optimizer=sgd", "client.lr=0.001")
    plain, masked = (
        train(*words, *more, folder=name, small=False) for name, more in (("plain", ()), ("masked", (ON,)))
    )
    within_rounding(plain, masked)
    for one, other in zip(plain.rows[1:], masked.rows[1:], strict=True):
        assert other["personal_accuracy"] == pytest.approx(one["personal_accuracy"], abs=0.02)
        assert other["secure"]["clipped"] == 0
        assert other["fusion_gap_text"] == pytest.approx(one["fusion_gap_text"], rel=1e-2)
    assert not (masked.folder / "personal.json").exists()


@pytest.mark.slow
def test_fewer_bits_cost_precision_and_save_bytes(train):
    full = train(ON, *PLAIN, "num_rounds=1", folder="full")
    few = train(ON, *PLAIN, "num_rounds=1", "secure_aggregation.bits=24", folder="few")
    assert few.rows[1]["secure"]["rounding"] > 200 * full.rows[1]["secure"]["rounding"]
    assert far(full, few) <= few.rows[1]["secure"]["rounding"] + full.rows[1]["secure"]["rounding"]
    bytes_of = [
        sum(v for k, v in r.rows[1]["bytes_up_by_role"].items() if k != "masked") for r in (full, few)
    ]
    assert bytes_of[1] == bytes_of[0] * 3 // 4


@pytest.mark.slow
def test_two_masked_runs_are_equal_to_the_bit_although_every_mask_is_new(train):
    one, other = (train(ON, "num_rounds=2", folder=name) for name in ("one", "other"))
    assert same_bits(one.model, other.model)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_with_new_masks(train):
    words = (ON, "client.lr_schedule=constant", "strategy.warmup_rounds=1")  # whatever the number of rounds
    whole = train(*words, "num_rounds=3", folder="whole")
    train(*words, "num_rounds=2", folder="parts")
    parts = train(*words, "num_rounds=3", folder="parts", resume=True)
    assert same_bits(whole.model, parts.model)


@pytest.mark.slow
def test_too_large_updates_are_clipped_counted_and_said(train, caplog):
    run = train(ON, *PLAIN, "num_rounds=1", "secure_aggregation.clip=0.0001")
    assert run.rows[1]["secure"]["clipped"] > 100
    assert "values of updates were clipped: raise secure_aggregation.clip" in caplog.text
    moved = run.model_after(1)
    assert moved and run.rows[1]["clients_ok"] == 3


@pytest.mark.slow
def test_a_site_keeps_its_own_norm(train):
    run = train(ON, *PLAIN, "num_rounds=1", "secure_aggregation.max_norm=0.01")
    drift = run.rows[1]["drift"]
    assert sum(part["mean_update"] ** 2 for part in drift.values()) ** 0.5 <= 0.01 * 1.01


# Drop-outs --------------------------------------------------------------------------------------------


class Lossy(InProcessGrid):
    """Answers of `gone` are lost from a step on; every answer that was given is kept in `seen`."""

    gone: dict[str, str] = {}  # noqa: RUF012
    seen: list[Message] = []  # noqa: RUF012

    def run_client(self, message: Message) -> Message:
        client = str(message.metadata.dst_node_id - 1)
        step = "hello" if message.metadata.message_type == MessageType.QUERY else "mask"
        if message.metadata.message_type == MASKING:
            step = json.loads(masking_text(message))["step"]
        order = ("hello", "keys", "shares", "mask", "confirm", "unmask")
        if client in self.gone and order.index(step) >= order.index(self.gone[client]):
            raise RuntimeError("lost")
        answer = super().run_client(message)
        self.seen.append(answer)
        return answer

    def pull_messages(self, message_ids):
        found = []
        for message_id in message_ids:
            message = self.waiting.pop(message_id)
            try:
                found.append(self.run_client(message))
            except RuntimeError:
                found.append(Message(Error(code=2, reason="lost"), reply_to=message))
        return found


@pytest.fixture
def lossy(monkeypatch):
    monkeypatch.setattr("fedfrozen_app.runtimes.inprocess.runtime.InProcessGrid", Lossy)
    monkeypatch.setattr(Lossy, "gone", {})
    monkeypatch.setattr(Lossy, "seen", [])
    return Lossy


LATER = [pytest.param(step, marks=pytest.mark.slow) for step in ("keys", "shares", "confirm")]


@pytest.mark.parametrize("step", [*LATER, "mask", "unmask"])
def test_the_round_closes_without_a_client_that_is_lost_at_a_step(train, lossy, step):
    """Of four clients one goes; the others' sum is that of a plain run in which it is set aside."""
    lossy.gone = {"1": step}
    masked = train(ON, "num_clients=4", "num_rounds=1", *PLAIN, folder="masked")
    row = masked.rows[1]
    inside = step in ("confirm", "unmask")  # its vector was in by then
    assert row["clients_ok"] == 4 - (not inside) and row["secure"]["summed"] == 4 - (not inside)
    lossy.gone = {} if inside else {"1": "mask"}
    plain = train("num_clients=4", "num_rounds=1", *PLAIN, folder="plain")
    assert far(plain, masked) <= 2 * row["secure"]["rounding"]


@pytest.mark.parametrize("step", [*LATER, "mask", "unmask"])
def test_with_too_few_left_the_model_stays_as_it_was(train, lossy, step, tmp_path):
    lossy.gone = {"1": step, "2": step}
    with pytest.raises(RunFailed, match="needed"):
        train(ON, "num_clients=4", "num_rounds=1", *PLAIN)
    run = Run(tmp_path / "run")
    lossy.gone = {}
    start = train("num_clients=4", "num_rounds=0", folder="initial").model
    assert same_bits(run.model_after(1), start) and same_bits(run.model, start)
    assert "discarded" in run.rows[1]


def test_no_reply_of_a_client_holds_anything_in_the_clear(train, lossy):
    """Of all that the server is sent in a run: no number of examples, no figure, no value of an update."""
    train("num_rounds=1", *PLAIN, folder="plain")
    plain = [read_reply(m) for m in lossy.seen if "reply" in m.content]
    lossy.seen = []
    train(ON, "num_rounds=1", *PLAIN, folder="masked")
    masked = [read_reply(m) for m in lossy.seen if "reply" in m.content]
    assert len(plain) == len(masked) == 3
    for clear, hidden in zip(plain, masked, strict=True):
        assert hidden.examples == 0 and hidden.metrics == {} and set(hidden.arrays) == {work.MASKED}
        sent = hidden.arrays[work.MASKED].numpy().tobytes()
        whole = b"".join(value.numpy().tobytes() for value in clear.arrays.values())
        pieces = {whole[start : start + 8] for start in range(0, len(whole) - 8, 4)}
        assert not any(sent[start : start + 8] in pieces for start in range(len(sent) - 8))
    texts = " ".join(masking_text(m) for m in lossy.seen if "masking" in m.content)
    assert "train_loss" not in texts and "examples" not in texts


# What does not go with sums ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("aggregation=median",),
            "aggregation=median compares updates one by one, and secure_aggregation=on",
        ),
        (("aggregation=krum",), "aggregation=krum compares updates one by one"),
        (("aggregation.far_out=3",), "aggregation.far_out=3.0 measures updates one by one"),
        (("checkpoint.uploads=0",), "checkpoint.uploads=0 keeps updates one by one"),
        (("privacy=dp_sgd", "privacy.audited=0"), "privacy.audited=0 watches updates one by one"),
        (("personal=true",), "personal=true reports how each client's model does"),
        (("strategy=safl", "strategy.keep=0.5"), "strategy.keep=0.5 sends some values and their places"),
        (("secure_aggregation.bits=20",), "use 8, 12, 16, 24 or 32"),
        (("secure_aggregation.threshold=0.4",), "secure_aggregation.threshold=0.4 is out of range"),
        (("secure_aggregation.min_cohort=1",), "secure_aggregation.min_cohort=1 is out of range"),
    ],
)
def test_what_needs_single_updates_is_refused_with_a_sentence(words, sentence):
    with pytest.raises(UserError, match=sentence.replace(".", r"\.")):
        read(resolved(compose_config([ON, *words])))


def test_a_strategy_that_needs_replies_one_by_one_says_so(monkeypatch):
    monkeypatch.setattr("strategies.fedavg.FedAvg.one_by_one", "ranks")
    with pytest.raises(UserError, match="strategy=fedavg ranks updates one by one"):
        read(resolved(compose_config([ON, "strategy=fedavg"])))


def test_a_cohort_that_is_too_small_is_said_before_the_first_round(train):
    with pytest.raises(UserError, match=r"min_cohort=3 clients make a sum at least, and a round has 2"):
        train(ON, "num_clients=4", "participation=0.5")


def test_the_closing_table_tells_what_the_server_saw():
    rows = [
        {"round": 1, "secure": {"summed": 5, "rounding": 1e-6, "clipped": 0}},
        {"round": 2, "secure": {"summed": 4, "rounding": 3e-6, "clipped": 7}},
        {"round": 3, "secure": {"cohort": 2}, "discarded": "too few"},
    ]
    assert dict(masked_facts(rows)) == {
        "Masked: smallest sum": "over 4 clients",
        "Masked: rounding of a mean, at most": "3e-06 a round",
        "Masked: values clipped": "7",
    }
    assert dict(masked_facts([{"round": 1}])) == {}


def test_clients_that_could_train_together_mask_one_by_one(train):
    run = train(ON, "num_rounds=1", *PLAIN, "runtime.runner=cohort")
    assert run.rows[1]["secure"]["summed"] == run.rows[1]["clients_ok"] == 3
