"""The files of a site's kit."""

from fedfrozen_app.sites.kit_templates import (
    DOCKERFILE,
    METRICS,
    MONITORING,
    NO_NETWORK,
    QUIET,
    SAFE,
    START,
    unit,
)

SUPERNODE = f"""\
#!/bin/sh
# Talks to the server. It opens no port: the executor meets it at a socket in run/.
set -eu
cd "$(dirname "$0")"
{QUIET}exec fedfrozen site node .
"""

EXECUTOR = f"""\
#!/bin/sh
# Trains, with the package that is installed here, as far as policy.yaml allows. It needs no network.
set -eu
cd "$(dirname "$0")"
{QUIET}exec fedfrozen site exec .
"""

SITE_YAML = """\
# Who this site is and where its data lie. Only this file can name a path; the server never can.
name: @name
superlink: @superlink
# Views: the data that a run may train on, by name. A run only names a view; this file alone sets its rows,
# columns, classes and the unit that epsilon protects.
# kind: digits | images | parquet | text | conll | brat | i2b2 | mimic | dicom | nifti | omop (path: a
# database, query: the cohort as a SELECT) | table (columns: those that a model may read; task: classification
# | multilabel | regression | survival, with label_column, or time_column and event_column; with a query, path
# is a database);
# path: relative to this folder; classes: those that all sites have agreed on, required for every run
# (`fedfrozen site check .` lists those found here); unit: example | document | patient, with its unit_column;
# examples: the number of rows that is sent to the server (without it, the true one rounded to tens).
views:
  main: @data
model_path: null       # folder of a pretrained model, where runs start from one (model=checkpoint)
# match_key: a secret phrase that all sites share and the server does not know. A census compares the sites'
# rows by hashes under this key, where census_matches of policy.yaml allows it.
match_key: null
folder: var            # cache, state and audit.jsonl; needs room for some copies of the model
cache_gb: 4            # of arrays kept between rounds
# Seconds after which a process of this site counts as hung and is restarted. transfer: no piece of a message
# received or sent; idle: working on a message without computing; training: working on one message in total.
limits: {transfer: 300, idle: 300, training: 86400}
"""

POLICY_YAML = """\
# What this site allows, whatever the server asks. Changes count from the next message on.
strategies: @strategies   # names that a run may use
# SHA-256 of the app bundles that a run may have; any: all of them. The bundle's own code is never run here.
bundles: [@bundle]
upload_roles: @roles   # what may leave, by role
min_examples: 50                           # an update from fewer rows would reveal too much about them
min_people: 20                             # people, where the view's unit is patient; else rows
secure_aggregation: optional               # required: only runs in which the server sees sums over sites
min_cohort: 3                              # fewest sites in such a sum
min_threshold: 0.66                        # share of a round's sites that must stay; higher: more colluders
min_neighbours: 160                        # with which a site shares masks; all of a smaller round
differencing: data                         # refuse sums that isolate fewer sites, by view; model: by model
privacy_required: @private                 # refuse runs without differential privacy
max_epsilon: @epsilon                      # of all private runs together
max_delta: 1.0e-5                          # of all private runs together
noise_in_sum: false                        # with privacy_required: noise that is enough in the sum counts
approval: @approval                        # ask: a person approves each run (site pending); policy: no person
metrics: @metrics                          # losses and accuracies leave too; never with privacy_required
rounds_per_day: @rounds
hellos_per_day: 50
judgements_per_day: 10
refusals_per_day: 100                      # refusals and failures; after that, no answers for a day
# Before training, a server may ask for counts of the data (docs: census). yes, no, or ask: a person decides.
census: @census
census_floor: 10                           # fewest people in a published cell; smaller cells are hidden
census_columns: {}                         # {age: [0, 18, 40, 65, 120], sex: [F, M]}: bin edges, or levels
census_matches: false                      # exact hashes of rows (match_key); never with privacy_required
censuses_per_day: 20
# A survival study (docs: survival) gets nothing (none), counts per time bin (binned), or exact times, from
# which a server can derive each person's time and covariates (exact). Approved as runs are.
survival: none
survival_columns: []                       # [days, died, arm, age]; rows missing one of them are left out
survival_edges: []                         # [0, 90, 180, 365, 730, 1825]
survival_groups: {}                        # {arm: [usual, new]}: columns to compare, with all their levels
survival_regression: false                 # sums of covariates too, for coefficients that the server chooses
survival_answers_per_day: 60               # a Cox regression takes one per step
subgroups: []                              # columns whose groups are evaluated separately: [sex, age_band]
forbidden_columns: []                      # never read by a run on a table, a census or a study
availability: []                           # hours in which the site trains: [Mon-Fri 19:00-07:00]; []: always
downloads: false                           # models or data from the Hugging Face hub
tokenizers: any                            # own: refuse runs with a tokenizer trained at the server
max_tokens: 8192                           # per text, all chunks together
# What `fedfrozen site metrics` shows on this machine: none, health (processes, disk, link), or activity (also
# rounds, replies, bytes and epsilon).
monitoring: @monitoring
"""

# A real site starts with a strict policy that its steward relaxes; a trial federation should simply run.
POLICY_STRICT = {
    "strategies": "[fedfrozen]",
    "roles": "[value, output, mlp, norm, head]",
    "private": "true",
    "epsilon": "3.0",
    "rounds": "100",
    "approval": "ask",
    "metrics": "false",
    "monitoring": "none",
    "census": "ask",
}
POLICY_TO_TRY = {
    "strategies": "[fedavg, fedprox, fedfrozen, safl]",
    "roles": "[embedding, query, key, value, output, mlp, norm, head, adapter]",
    "private": "false",
    "epsilon": "8.0",
    "rounds": "500",
    "approval": "policy",
    "metrics": "true",
    "monitoring": "activity",
    "census": "yes",
}

SITE_COMPOSE = f"""\
services:
  supernode:
    build: .
    command: sh supernode.sh
{SAFE}  executor:
    build: .
    command: sh executor.sh
    network_mode: none
{SAFE}"""

SITE_README = """\
# The kit of the site @name

Put your data where `site.yaml` says, read `policy.yaml` and change it to what you allow. These two files are
yours; the others are signed by the federation's authority and must not change (put your own settings for
the processes into a systemd drop-in). Then three commands:

1. `fedfrozen site check .` checks everything: files, certificate, TLS, key, data, disk, policy,
   and whether SuperNode and executor answer.
2. `sh start.sh` joins the federation. As a service: copy the `.service` files to /etc/systemd/system (they
   expect this folder as /opt/fedfrozen/@name, the package in /opt/fedfrozen/venv or system-wide, and a user
   `fedfrozen`), or `docker compose up --build`.
3. `fedfrozen site audit .` shows what was asked, what was sent and what was refused. `fedfrozen site
   pending .` lists the runs that wait for you, `site show HASH .` describes one, and `site approve HASH .`
   accepts it.

With `monitoring: health` in `policy.yaml`, `sh metrics.sh` shows numbers to a Prometheus on this machine
(`prometheus.yml`, `alerts.yml`, `dashboard.json` for Grafana). They leave this machine only if you send them.

`node.key` is this site's identity and was made here; with `link.pem`, made at the first start, the two
processes authenticate each other. Neither leaves this folder.

Renew the certificate before it ends (`site check` shows when): `fedfrozen site renew .`, send `@name.csr` to
the authority, and `fedfrozen site install RECEIVED .`; the server admits the new `node.crt`. Data, policy,
budget and audit log stay as they are.

The fallback is Flower's own way, `fedfrozen site node . --run-code-of-server` and no executor: every message
starts a process, **and it runs the code that the server sends, without this policy**: only where you trust
it.
"""

SITE = {
    "supernode.sh": SUPERNODE,
    "executor.sh": EXECUTOR,
    "start.sh": START.format(parts="supernode executor"),
    "metrics.sh": METRICS.format(exports=QUIET, party="site"),
    **MONITORING,
    "site.yaml": SITE_YAML,
    "policy.yaml": POLICY_YAML,
    "fedfrozen-supernode.service": unit("SuperNode", "@name", "/bin/sh supernode.sh"),
    "fedfrozen-executor.service": unit("executor", "@name", "/bin/sh executor.sh", more=NO_NETWORK),
    "fedfrozen-metrics.service": unit("numbers for Prometheus", "@name", "/bin/sh metrics.sh"),
    "Dockerfile": DOCKERFILE,
    "docker-compose.yaml": SITE_COMPOSE,
    "README.md": SITE_README,
}
