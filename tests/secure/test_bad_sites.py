"""A certified site that sends its server bad keys: the other sites' rounds go on without it."""

import datetime
import json

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from fedfrozen_app.core.certificates import subject_of
from fedfrozen_app.exchange.masking_messages import MASKING, masking_reply, masking_text
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.files.folders import authorities_file
from fedfrozen_app.secure import secagg_messages
from fedfrozen_app.secure.roster import signed_text, to_bytes, to_text
from fedfrozen_app.sites.masking import Certified
from tests.secure.attacks import ROUND, content
from tests.sites.inprocess import SiteGrid

TWO = "secure_aggregation.min_cohort=2"
ASKED = []  # the terms of rounds


def misled(step, change):
    """The grid of a server whose site south answers something else at this step."""

    class Misled(SiteGrid):
        def run_client(self, message):
            text = masking_text(message) if message.metadata.message_type == MASKING else "{}"
            answer = super().run_client(message)
            if message.metadata.dst_node_id == 2 and json.loads(text).get("step") == step:
                return masking_reply(message, canonical(change(json.loads(masking_text(answer)))))
            return answer

    return Misled


def of_another_authority(answer):
    """A certificate that south has made for itself, and a signature that fits it."""
    key = ec.generate_private_key(ec.SECP384R1())
    name, now = subject_of("south", "site"), datetime.datetime.now(datetime.UTC)
    built = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    built = built.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    own = Certified(key, built.sign(key, hashes.SHA384()))
    name, *parts = answer["entry"]
    signed = signed_text(ASKED[-1], name, *map(to_bytes, parts[:3]))
    return {"entry": [name, *parts[:3], to_text(own.credential), to_text(own.sign(signed))]}


def with_false_signature(answer):
    return {"entry": [*answer["entry"][:-1], to_text(b"no signature")]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_false_signature, "its signature is another's"),
        pytest.param(
            of_another_authority, "it is not of this federation's authority", marks=pytest.mark.slow
        ),
    ],
)
def test_one_site_s_bad_keys_do_not_stop_the_others(sites, change, reason, monkeypatch):
    """A roster with one such entry is refused by every site: the server leaves it out, and says why."""
    ask_keys = secagg_messages.ask_keys
    monkeypatch.setattr(secagg_messages, "ask_keys", lambda terms: ASKED.append(terms) or ask_keys(terms))
    content(sites)
    place = authorities_file(sites.folder / "run")
    place.parent.mkdir(parents=True)
    place.write_bytes((sites.folder / "kits" / "server" / "ca.crt").read_bytes())
    run = sites.train(*ROUND, TWO, "aggregation.cohorts=free", make_grid=misled("keys", change))
    assert run.rows[1]["secure"]["summed"] == 2 and "discarded" not in run.rows[1]
    (why,) = [line for line in run.rows[1]["failures"] if "south" in line]
    assert f"sent keys that are not to be believed: {reason}" in why
