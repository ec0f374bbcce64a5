"""A site over real processes, killed (SIGKILL) in each state of a train request: `pytest -m slow`.

Executor or SuperNode is killed while the request is in that state, in another state each round; their
watchdogs start them again. The run must end well, each run and round be charged once, and no file of the
site ever hold what was not noised as its proposal says.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.files.seal import unsealed
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.request_states import State
from tests.conftest import Run, same_bits
from tests.sites.federation import ROOT, SITES, Deployment, federation
from tests.sites.twin import join, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
HOOK = Path(__file__).parent / "killed"
# In the order in which a request that trains passes them. `storing` is not a state: the round is charged
# there, and the reply that it pays for is not yet on the disk.
PASSED = (
    *(State.RECEIVED, State.CHECKED, State.APPROVED, State.ADMITTED, State.PREPARED, State.CHARGED),
    *(State.TRAINED, State.NOISED, "storing", State.STORED, State.MASKED, State.LOGGED, State.SENT),
)
BEFORE = {state: PASSED[:number] for number, state in enumerate(PASSED)}
TRAINING = (
    "strategy=fedavg",
    "model=linear",
    "client.optimizer=sgd",
    "client.lr=0.1",
    "client.weight_decay=0",
)
PATIENCE = ("runtime.min_nodes=3", "runtime.node_timeout=900", "runtime.round_timeout=900", "eval_every=20")
PRIVATE = ("privacy=dp_sgd", "privacy.epsilon=3", "privacy.delta=1e-5")
MASKS = (
    *("secure_aggregation=on", "secure_aggregation.min_cohort=2", "secure_aggregation.threshold=0.6"),
    *("secure_aggregation.step_timeout=900", "secure_aggregation.max_examples=200"),
)
SUM = ("secure_aggregation.noise=sum",)
COUNTED = ("secure_aggregation.quantile=0.5", "secure_aggregation.bits=24")
FREE = ("aggregation.cohorts=free",)  # sums of other sites in each round
EIGHT = ("secure_aggregation.bits=8", "secure_aggregation.rotate=true", "secure_aggregation.renew=4")


def in_rounds(states: tuple[str, ...]) -> dict[str, str]:
    return {str(number): str(state) for number, state in enumerate(states, 1)}


# Three sites at once, each in another state. The first round charges the run, the others their own.
ALL_SITES = {
    "north": in_rounds((State.CHARGED, State.RECEIVED, State.CHECKED, State.APPROVED, State.SENT)),
    "south": in_rounds((State.PREPARED, State.ADMITTED, State.TRAINED, State.NOISED, State.LOGGED)),
    "west": in_rounds(("storing", State.STORED, State.MASKED)),
}
# A masked round can miss one site of three: one is killed, in each state.
ONE_SITE = {"west": in_rounds((State.PREPARED, *(state for state in PASSED if state is not State.PREPARED)))}


@dataclass
class Victims:
    """The sites to kill, and where their marks are."""

    place: Path
    victim: str
    plans: dict[str, dict[str, str]]  # by site, by round: the state

    def marks(self, site: str) -> Path:
        return self.place / "marks" / site

    def prepare(self, monkeypatch) -> None:
        """Executors of these sites start with the hook."""
        start = Deployment.start

        def started(one: Deployment, party: str, script: str, *within: str) -> int:
            if script == "executor" and party in self.plans:
                self.marks(party).mkdir(parents=True, exist_ok=True)
                states, marks = self.plans[party], str(self.marks(party))
                plan = json.dumps({"states": states, "victim": self.victim, "marks": marks})
                within = ("env", f"PYTHONPATH={HOOK}:{ROOT}", f"KILLED={plan}", *within)
            return start(one, party, script, *within)

        monkeypatch.setattr(Deployment, "start", started)

    def killed(self, site: str) -> dict[str, Path]:
        """By state: the kit as it was when its process was killed in it."""
        found = {path.name.partition("-")[2]: path for path in self.marks(site).iterdir() if path.is_dir()}
        assert sorted(found) == sorted(self.plans[site].values()), "not every state was reached"
        return found


def trained(deployment: Deployment, folder: Path, *more: str) -> Run:
    line = [
        word for word in words(deployment, folder, *TRAINING, *PATIENCE, *more) if "model.config" not in word
    ]
    assert command(line) == 0
    return Run(folder)


def set_policies(deployment: Deployment, **more: object) -> None:
    for site in SITES:
        deployment.change(site, "policy.yaml", min_cohort=2, min_threshold=0.6, strategies=["fedavg"], **more)


def charged(kit: Path) -> dict:
    """The site's record of spent epsilon."""
    path = kit / "var" / "state" / "budget.json"
    return unsealed(path)["runs"] if path.exists() else {}


def paid(state: str) -> bool:
    """Whether a round is charged when this state is reached."""
    return "storing" in (*BEFORE[state], state)


def kept_replies(kit: Path, number: int) -> list[Path]:
    return sorted((kit / "var" / "state").glob(f"*/*/{number}/*.safetensors"))


def run_is_charged(plan: dict[str, str], number: int, *, again: bool) -> bool:
    """Whether the run is charged at the kill of this round; `again`: a round whose process was killed is done
    by the next one after all."""
    if again and number > 1:
        return True
    reached = [state for of_round, state in plan.items() if int(of_round) <= number]
    return any(State.CHARGED in (*BEFORE[state], state) for state in reached)


def check_charges(
    victims: Victims, site: str, kit: Path, rounds: set[int], *, again: bool = True, epsilon: float = 3
) -> None:
    """At each kill and at the end: charged when it is due, once, and nothing is kept before. `rounds`: those
    that the site took part in, in the end."""
    for state, then in victims.killed(site).items():
        number, record = int(then.name.partition("-")[0]), charged(then)
        passed = {*BEFORE[state], state}
        assert len(record) == run_is_charged(victims.plans[site], number, again=again), state
        done = next(iter(record.values()))["rounds"] if record else {}
        assert (str(number) in done) == paid(state), state
        assert bool(kept_replies(then, number)) == (State.STORED in passed), state
    (entry,) = charged(kit).values()
    assert (entry["epsilon"], entry["delta"]) == (epsilon, 1e-5)
    assert set(map(int, entry["rounds"])) == rounds


def check_no_secret(victims: Victims, site: str, kit: Path) -> None:
    """No file of the site holds a piece of an update that was not noised, at any kill or at the end."""
    pieces = {}
    for path in victims.marks(site).glob("*.secret"):
        arrays = load_file(path)
        largest = max(arrays.values(), key=lambda tensor: tensor.numel())
        raw = largest.numpy().tobytes()
        pieces[path.stem] = raw[len(raw) // 2 :][:64]
        assert len(pieces[path.stem]) == 64 and any(pieces[path.stem])
    assert pieces
    for folder in (kit, *victims.killed(site).values()):
        for file in folder.rglob("*"):
            if file.is_file():
                content = file.read_bytes()
                assert not [number for number, piece in pieces.items() if piece in content], file


def check_log(kit: Path, rounds: int) -> None:
    """Each round's update is new once at most: what is sent again is the same."""
    sent = [entry for entry in read_audit(kit / "var" / "audit.jsonl") if entry["event"] == "sent"]
    for number in range(1, rounds + 1):
        of_round = [entry for entry in sent if entry["round"] == number]
        assert len([entry for entry in of_round if not entry["again"]]) <= 1, number


def test_the_states_are_those_of_a_train_request():
    assert {str(state) for state in State} - {str(state) for state in PASSED} == {
        "recalled",  # after a kill
        "asked",  # a round with arrays that are not here, which changes nothing
        "postponed",  # outside the opening hours, where nothing has begun
        "stepped",  # the steps of masks: tests/secure/test_real.py
    }


def test_all_states_are_covered():
    for plans in (ALL_SITES, ONE_SITE):
        assert sorted(state for plan in plans.values() for state in plan.values()) == sorted(map(str, PASSED))


@pytest.mark.parametrize("victim", ["executor", "supernode"])
def test_private_sites_are_killed_in_each_state(tmp_path, monkeypatch, victim):
    """Every round has all three sites in the end, and each paid once."""
    victims = Victims(tmp_path, victim, ALL_SITES)
    victims.prepare(monkeypatch)
    with federation(tmp_path / "fed", SITES) as deployment:
        set_policies(deployment)
        join(deployment, SITES)
        run = trained(deployment, tmp_path / "run", "num_rounds=6", *PRIVATE)
        for site in SITES:
            check_charges(victims, site, deployment.kits / site, set(range(1, 7)))
            check_log(deployment.kits / site, rounds=6)
    assert [row["clients_ok"] for row in run.rows[1:]] == [3] * 6, [row.get("failures") for row in run.rows]
    assert 0 < run.rows[-1]["epsilon_max"] <= 3


def test_a_plain_run_ends_with_the_bits_of_the_unbroken_one(tmp_path, monkeypatch):
    victims = Victims(tmp_path, "executor", ALL_SITES)
    victims.prepare(monkeypatch)
    with federation(tmp_path / "fed", SITES) as deployment:
        set_policies(deployment)
        join(deployment, SITES)
        broken = trained(deployment, tmp_path / "broken", "num_rounds=6")
        for site in SITES:
            victims.killed(site)
            check_log(deployment.kits / site, rounds=6)
        whole = trained(deployment, tmp_path / "whole", "num_rounds=6")
    assert [row["clients_ok"] for row in broken.rows[1:]] == [3] * 6
    assert same_bits(whole.model, broken.model)


@pytest.mark.parametrize("victim", ["executor", "supernode"])
@pytest.mark.parametrize(
    "masks",
    [
        (*PRIVATE, *SUM),
        (*PRIVATE, *SUM, *COUNTED),
        FREE,
        (*FREE, *EIGHT),
        (*FREE, "secure_aggregation.bits=12", "codec.down=int8"),
    ],
    ids=["noise in the sum", "noise and a count", "masks alone", "8 bits", "12 bits"],
)
def test_a_site_with_masks_is_killed_in_each_state(tmp_path, monkeypatch, masks, victim):
    """A killed executor has dropped out of its round, which closes without it; the site is in the next."""
    victims = Victims(tmp_path, victim, ONE_SITE)
    victims.prepare(monkeypatch)
    rounds, noise = len(PASSED) + 1, PRIVATE[0] in masks
    with federation(tmp_path / "fed", SITES) as deployment:
        set_policies(deployment, differencing="model")
        join(deployment, SITES)
        run = trained(deployment, tmp_path / "run", f"num_rounds={rounds}", *MASKS, *masks)
        west = deployment.kits / "west"
        if noise:
            took_part = set(range(1, rounds + 1))
            if victim == "executor":  # its masks are lost: it is charged for what it had charged by then
                took_part = {int(number) for number, state in ONE_SITE["west"].items() if paid(state)}
                took_part |= {rounds}
            check_charges(victims, "west", west, took_part, again=victim == "supernode")
            check_no_secret(victims, "west", west)
        check_log(west, rounds)
        assert set(victims.killed("west")) == set(map(str, PASSED))
    summed = [row["secure"]["summed"] for row in run.rows[1:]]
    assert len(summed) == rounds and summed[-1] == 3
    if victim == "executor":
        assert summed[:-1] == [2] * len(PASSED)
    assert set(summed) <= {2, 3} and not any("discarded" in row for row in run.rows)
