"""A server that makes one proposal train and another one send: what a site keeps belongs to one proposal."""

import pytest
import torch
from flwr.app import MessageType
from safetensors.torch import load_file

from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.exchange.messages import Reply, read_reply, read_train
from fedfrozen_app.exchange.proposal import read_proposal
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.files.disk import save_tensors
from fedfrozen_app.files.seal import sealed
from fedfrozen_app.sites import handle_train
from fedfrozen_app.sites.approval import Approvals
from fedfrozen_app.sites.audit_log import AuditLog, read_audit
from fedfrozen_app.sites.request_handler import RequestHandler
from fedfrozen_app.sites.site_budget import SiteBudget
from fedfrozen_app.sites.store import RunStore
from tests.sites.inprocess import SiteGrid
from tests.sites.test_hostile import proposed

SGD = ("client.optimizer=sgd", "client.weight_decay=0", "client.lr=0.5", "client.lr_schedule=constant")
PRIVATE = ("num_rounds=1", "strategy.warmup_rounds=1", "privacy=dp_sgd", *SGD)
MASKED = ("secure_aggregation=on", "secure_aggregation.max_examples=200", "secure_aggregation.clip=4")
IN_SUM = (*PRIVATE, *MASKED, "secure_aggregation.noise=sum", "privacy.epsilon=4")
# Numbers without room for the noise.
WITHOUT_ROOM = (
    *(*PRIVATE, "secure_aggregation=on", "secure_aggregation.noise=sum", "privacy.epsilon=4"),
    *("secure_aggregation.bits=16", "secure_aggregation.clip=0.001", "secure_aggregation.max_examples=1"),
)
CHEAP = (*PRIVATE, "privacy.epsilon=0.05")  # so much noise that nothing of an update is left
HASH = "a" * 64


def require(sites, **more):
    for name in sites.names:
        sites.change(name, "policy.yaml", privacy_required=True, noise_in_sum=True, **more)


def state(sites, name="north"):
    return sites.kit(name).var / "state"


def spent(sites, name="north"):
    return SiteBudget(state(sites, name) / "budget.json").spent()[0]


def log(sites, name="north"):
    return read_audit(sites.kit(name).audit)


@pytest.fixture
def trained(monkeypatch):
    """By site: what its client returned last within the site, before the site adds noise or masks."""
    found: dict[str, Reply] = {}
    finish_client = handle_train.finish_client

    def recording(progress):
        reply, private = finish_client(progress)
        if reply.arrays:
            found[progress.site.kit.name] = reply
        return reply, private

    monkeypatch.setattr(handle_train, "finish_client", recording)
    return found


class Listening(SiteGrid):
    """Keeps what the sites answer to the orders of the last run, and the model that they began from."""

    def run_client(self, message):
        answer = super().run_client(message)
        if message.metadata.message_type == MessageType.TRAIN:
            self.sent[self.executors[message.metadata.dst_node_id - 1].kit.name] = read_reply(answer)
            self.base |= read_train(message)[1]
        return answer


@pytest.fixture
def listening():
    return type("Grid", (Listening,), {"sent": {}, "base": {}})


@pytest.fixture
def approving():
    """The same, with a person at every site who approves whatever is asked."""

    class Grid(Listening):
        sent, base = {}, {}

        def run_client(self, message):
            answer = super().run_client(message)
            if message.metadata.message_type != MessageType.QUERY:
                return answer
            approvals = Approvals(self.executors[message.metadata.dst_node_id - 1].kit.approvals)
            for asked in approvals.proposals():
                approvals.decide(asked.hash, approved=True)
            return super().run_client(message)

    return Grid


def fails(sites, *words, folder="first", **more):
    with pytest.raises((RunFailed, UserError)):
        sites.train(*words, folder=folder, **more)


def unnoised(sites, trained):
    """Every site's update without noise: noise in the sum is not yet in what the ClientApp returns. One full
    step from the same model: it is the same in every run."""
    sites.train(*IN_SUM, "run_id=reference", folder="reference")
    found = dict(trained)
    trained.clear()
    assert set(found) == set(sites.names)
    return found


def is_on_disk(sites, arrays, name="north"):
    """Whether a file of the site holds one of these arrays, by itself or among the bytes of a reply."""
    wanted = [
        value.contiguous().view(-1).numpy().tobytes() for value in arrays.values() if value.numel() > 99
    ]
    files = [path.read_bytes() for path in state(sites, name).rglob("*") if path.is_file()]
    return any(bytes_ in content for content in files for bytes_ in wanted)


def moved(arrays, base):
    names = sorted(set(arrays) & set(base))
    return torch.cat([(arrays[name].double() - base[name].double()).flatten() for name in names])


def test_an_update_without_noise_is_not_sent_under_another_proposal(sites, trained, listening):
    """Proposal 1 has noise in the sum, which does not fit; proposal 2, of the same run and for the same work,
    has noise at the site. Before, the site trained for 1, kept that without noise, and sent it for 2."""
    require(sites)
    fails(sites, *WITHOUT_ROOM, make_grid=listening)
    assert log(sites)[-1]["event"] == "declined" and "would not fit" in log(sites)[-1]["reason"]
    assert not trained and spent(sites) == 0.0  # known before anything trains
    sites.train(*CHEAP, folder="second", make_grid=listening)
    reply, before = listening.sent["north"], unnoised(sites, trained)["north"]
    assert set(reply.metrics) == {"epsilon", "delta"} and 0 < reply.metrics["epsilon"] <= 0.05
    plain, sent = moved(before.arrays, listening.base), moved(reply.arrays, listening.base)
    assert len(sent) == len(plain) > 1000 and plain.norm() > 0
    assert (sent - plain).norm() > 10 * plain.norm()
    assert not any(torch.equal(reply.arrays[name], value) for name, value in before.arrays.items())


def test_nor_under_masks_that_are_required_nor_after_a_person_approved(sites, trained, approving):
    """The sum over the sites would tell it, as the model that the server then has."""
    require(sites, secure_aggregation="required", approval="ask")
    fails(sites, *WITHOUT_ROOM, make_grid=approving)
    assert not trained and "would not fit" in log(sites)[-1]["reason"]
    run = sites.train(*CHEAP, *MASKED, folder="second", make_grid=approving)
    assert [entry["approved_by"] for entry in log(sites) if entry["event"] == "hello"] != ["the policy"] * 2
    for name in sites.names:
        sites.change(name, "policy.yaml", approval="policy")
    before = unnoised(sites, trained)
    total = sum(reply.examples for reply in before.values())
    mean = {
        name: sum(before[site].arrays[name].double() * before[site].examples for site in before) / total
        for name in before["north"].arrays
    }
    plain, sent = moved(mean, approving.base), moved(run.model, approving.base)
    assert (sent - plain).norm() > 10 * plain.norm()


def test_a_site_that_dies_after_training_is_bound_to_its_proposal(sites, trained, monkeypatch, listening):
    """The epsilon is charged before the first step: another proposal of the run gets nothing, and nothing
    without noise is on the disk."""
    require(sites)
    reference = unnoised(sites, trained)["north"]
    before = spent(sites)

    def dies(self, *args):
        assert spent(sites) == before + 4  # paid for
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "write", dies)
        fails(sites, *IN_SUM)
    assert torch.equal(trained["north"].arrays["classifier.weight"], reference.arrays["classifier.weight"])
    assert not is_on_disk(sites, reference.arrays)
    fails(sites, *CHEAP, folder="second")
    assert "began with other settings" in log(sites)[-1]["reason"]
    assert spent(sites) == before + 4


def test_what_is_kept_has_noise_and_is_sent_again_under_new_masks(sites, trained, monkeypatch):
    """The site dies after it has kept its reply and before it sends: it does not train or pay again."""
    require(sites)
    reference = unnoised(sites, trained)["north"]
    real, before = AuditLog.write, spent(sites)

    def dies(self, event, **details):
        if event == "sent":
            raise OSError("killed")
        real(self, event, **details)

    with monkeypatch.context() as patch:
        patch.setattr(AuditLog, "write", dies)
        fails(sites, *IN_SUM)
    assert set(trained) == set(sites.names)
    trained.clear()
    (kept,) = (state(sites) / "test").glob("*/1/*.safetensors")
    assert [*load_file(kept)] == ["noised-3-2-3"] and len(kept.stem) == 64
    assert "noise_multiplier" not in kept.with_suffix(".json").read_text()
    assert not is_on_disk(sites, reference.arrays)
    run = sites.train(*IN_SUM, folder="again")
    assert run.rows[1]["clients_ok"] == 3 and not trained
    assert spent(sites) == before + 4
    sent = [entry for entry in log(sites) if entry["event"] == "sent"][-1]
    assert set(sent["metrics"]) == {"epsilon", "delta"} and "classifier.weight" in sent["masked"]["arrays"]


def test_no_proposal_finds_what_another_has_kept(tmp_path):
    store, reply = RunStore(tmp_path, keep=2), Reply("work", 5, {"a": torch.ones(3)}, {"epsilon": 1.0})
    store.write(HASH, 1, reply, {"b": torch.zeros(2)})
    assert torch.equal(store.reply_to(HASH, 1, "work").arrays["a"], torch.ones(3))
    assert torch.equal(store.private_before(HASH, 2)["b"], torch.zeros(2))
    assert store.reply_to("b" * 64, 1, "work") is None
    assert store.private_before("b" * 64, 2) is None
    assert store.reply_to(HASH, 1, "other work") is None


def test_private_arrays_pass_to_the_same_run_with_more_rounds_and_to_no_other(tmp_path):
    """A state of the algorithm that one proposal has trained must not enter another's update."""
    store = RunStore(tmp_path, keep=2)
    first = read_proposal(canonical(proposed("num_rounds=2")))
    longer = read_proposal(canonical(proposed("num_rounds=4")))
    other = read_proposal(canonical(proposed("num_rounds=4", "client.lr=0.123")))
    private = read_proposal(canonical(proposed("num_rounds=4", "privacy=dp_sgd")))
    for proposal in (first, longer, other, private):
        store.accept(proposal)
    store.write(first.hash, 2, Reply("work"), {"b": torch.ones(2)})
    assert torch.equal(store.private_for(first, 3)["b"], torch.ones(2))
    assert torch.equal(store.private_for(longer, 3)["b"], torch.ones(2))
    assert store.private_for(longer, 2) is None
    assert store.private_for(other, 3) is None and store.private_for(private, 3) is None
    store.write(longer.hash, 3, Reply("work"), {"b": torch.zeros(2)})
    assert torch.equal(store.private_for(longer, 4)["b"], torch.zeros(2))
    assert torch.equal(store.private_for(first, 4)["b"], torch.ones(2))


def write_old(folder, order, **arrays):
    """As an earlier version wrote a round: its reply without a proposal, before noise."""
    folder.mkdir(parents=True)
    save_tensors({"b": torch.full((2,), float(len(order)))}, folder / "private.safetensors")
    save_tensors({"a": torch.ones(3)}, folder / "reply.safetensors")
    record = {"order": order, "names": ["a"], "examples": 5, "metrics": {}}
    (folder / "reply.json").write_text(sealed(record, *sorted(folder.iterdir())))


def test_replies_of_an_earlier_version_are_deleted_when_the_site_starts(sites, caplog):
    kit, proposal = sites.kit("north"), read_proposal(canonical(proposed()))
    run, audit = state(sites) / "test", AuditLog(kit.audit)
    write_old(run / "1", "sent")
    write_old(run / "2", "never sent")  # nobody knows for which proposal
    (run / "privacy").mkdir()
    (run / "privacy" / "north.json").write_text("{}")
    (run / "proposal.json").write_text(proposal.text)
    audit.write("sent", run="test", proposal=proposal.hash, order="sent", round=1)
    write_old(state(sites) / "lost" / "7", "work")  # a run without its proposal
    site = RequestHandler(kit).site
    assert not list(state(sites).rglob("reply.*"))
    assert "deleted those of 3 rounds. The private state of 1 round is kept" in caplog.text
    store = site.store(proposal)
    assert store.rounds(proposal.hash) == [1] and store.reply_to(proposal.hash, 1, "sent") is None
    assert torch.equal(store.private_for(proposal, 3)["b"], torch.full((2,), 4.0))
    assert (run / proposal.hash / "privacy" / "north.json").exists()
    caplog.clear()
    RequestHandler(kit)
    assert not caplog.text and store.rounds(proposal.hash) == [1]


def test_a_round_that_an_earlier_version_kept_under_its_proposal_is_moved(sites):
    kit, proposal = sites.kit("north"), read_proposal(canonical(proposed()))
    run = state(sites) / "test"
    RunStore(run, keep=2).write(proposal.hash, 1, Reply("work", 5, {"a": torch.ones(3)}), {})
    (run / proposal.hash / "1").rename(run / "1")
    (run / "proposal.json").write_text(proposal.text)
    store = RequestHandler(kit).site.store(proposal)
    assert torch.equal(store.reply_to(proposal.hash, 1, "work").arrays["a"], torch.ones(3))
