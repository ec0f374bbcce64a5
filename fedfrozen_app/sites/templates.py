"""The files of a kit. `@name` is filled in by provisioning; all else is as it will stand there.

Every Flower flag below is one that the installed Flower takes: a test asks its own parsers.
"""

import string


class Filled(string.Template):
    delimiter = "@"  # `$` is the shell's
    idpattern = (
        r"\b(?:name|superlink|port|data|bundle|address|internal_port|"
        r"strategies|roles|private|epsilon|rounds|approval|metrics|census)\b"
    )


QUIET = """\
export FLWR_TELEMETRY_ENABLED=0   # Flower would report its use otherwise
export FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_HOME="$PWD/flwr"
umask 077
"""

# Everybody ------------------------------------------------------------------------------------------------

START = """\
#!/bin/sh
# All processes in one terminal; they end together. For good, use the systemd units.
set -u
cd "$(dirname "$0")"
children=
for part in {parts}; do
  sh $part.sh & children="$children $!"
done
end() {{
  trap - INT TERM
  kill $children 2> /dev/null   # those that it started, and nobody else
  wait
}}
all_run() {{
  for child in $children; do kill -0 "$child" 2> /dev/null || return 1; done
}}
trap 'end; exit 143' TERM
trap 'end; exit 130' INT
while all_run; do
  sleep 1 & wait $!   # `wait` lets a signal in at once, `sleep` alone would not
done
end
exit 1
"""

# Of every unit: it can write its own kit and nothing else, and gains no rights.
UNIT = """\
[Unit]
Description=fedfrozen: {what}
After=network-online.target
Wants=network-online.target
# Never give up: after a crash Flower refuses a SuperNode until its old activation has lapsed, up to a minute.
StartLimitIntervalSec=0

[Service]
WorkingDirectory=/opt/fedfrozen/{folder}
Environment=PATH=/opt/fedfrozen/venv/bin:/usr/local/bin:/usr/bin:/bin
ExecStart={command}
Restart=always
RestartSec=15
User=fedfrozen
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet={capabilities}
AmbientCapabilities={capabilities}
ProtectSystem=strict
ReadWritePaths=/opt/fedfrozen/{folder}
ProtectHome=read-only
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
{more}

[Install]
WantedBy=multi-user.target
"""
TALKS = "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6\nPrivateDevices=yes"
# The executor reads what the server sends and has the data: it gets no network at all. Devices stay: a GPU.
# (With `downloads: true` in the policy it needs a network: `systemctl edit` takes these three lines back.)
NO_NETWORK = "PrivateNetwork=yes\nIPAddressDeny=any\nRestrictAddressFamilies=AF_UNIX"


def unit(what: str, folder: str, command: str, *, more: str = TALKS, capabilities: str = "") -> str:
    return UNIT.format(what=what, folder=folder, command=command, more=more, capabilities=capabilities)


DOCKERFILE = """\
# Put the fedfrozen wheel into wheels/ beside this file, then:
#   UID=$(id -u) GID=$(id -g) docker compose up --build
FROM python:3.11-slim
COPY wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl
WORKDIR /kit
USER 1000:1000
"""

# Of every service: without root, without further rights, its own file system read-only but for the kit.
SAFE = """\
    user: "${UID:-1000}:${GID:-1000}"   # the owner of this folder
    volumes: ["./:/kit"]
    cap_drop: [ALL]
    security_opt: ["no-new-privileges:true"]
    read_only: true
    tmpfs: ["/tmp"]
    restart: always
"""

# The server ----------------------------------------------------------------------------------------------

SUPERLINK = f"""\
#!/bin/sh
# The meeting point. It listens at a socket in run/ and on no port: the proxy lets the others in.
set -eu
cd "$(dirname "$0")"
{QUIET}exec fedfrozen server link .
"""

SUPEREXEC = f"""\
#!/bin/sh
# Starts the server's side of each run. It reaches the SuperLink through the proxy, on this machine.
set -eu
cd "$(dirname "$0")"
{QUIET}exec flower-superexec --runtime-api-address 127.0.0.1:@internal_port --root-certificates ca.crt \\
  --superexec-auth-secret-file superexec.secret
"""

PROXY = """\
#!/bin/sh
# The only door. Run it as the owner of this folder: it must enter run/.
set -eu
cd "$(dirname "$0")"
touch admitted.conf   # at first nobody is
if [ "$(id -u)" = 0 ]; then
  exec nginx -p "$PWD" -c nginx.conf -g 'user root;'   # else its workers would be somebody else
fi
exec nginx -p "$PWD" -c nginx.conf
"""

NGINX = """\
# The only door to the SuperLink, which listens at a socket. Each of Flower's three parts has its own guests:
#   Fleet    the sites, by their certificates (Flower asks for their keys as well)
#   Control  the operators, by theirs: Flower itself asks for nothing there, and who reaches it can start runs
#   Runtime  the server's own processes, on 127.0.0.1 alone (Flower asks for superexec.secret, then tokens)
# admitted.conf says who is let in, by the serial number of the certificate: `fedfrozen server admit|revoke`.
# Start it with proxy.sh, from this folder.
daemon off;
pid nginx.pid;
error_log stderr warn;
worker_processes 1;
events { worker_connections 1024; }
http {
  access_log off;
  server_tokens off;
  client_body_temp_path nginx-body;
  proxy_temp_path nginx-proxy;
  fastcgi_temp_path nginx-fastcgi;
  uwsgi_temp_path nginx-uwsgi;
  scgi_temp_path nginx-scgi;

  map_hash_bucket_size 128;  # serial numbers are long
  map_hash_max_size 16384;   # and there may be hundreds
  upstream superlink {
    server unix:run/superlink.sock;
    keepalive 32;  # a round is hundreds of small requests
  }
  map $ssl_client_serial $party {
    default "";
    include admitted.conf;
  }
  map $party $fleet_guest { default 0; "~^site " 1; }
  map $party $control_guest { default 0; "~^operator " 1; }

  # Nobody, however valid the certificate, keeps the server from answering the others.
  limit_conn_zone $binary_remote_addr zone=connections:1m;
  limit_req_zone $ssl_client_serial zone=requests:1m rate=300r/s;
  limit_conn_status 429;
  limit_req_status 429;
  client_header_timeout 10s;
  client_body_timeout 60s;
  send_timeout 60s;
  keepalive_timeout 75s;
  reset_timedout_connection on;
  large_client_header_buffers 4 8k;

  ssl_certificate server.crt;
  ssl_certificate_key server.key;
  ssl_protocols TLSv1.2 TLSv1.3;
  ssl_session_cache shared:tls:1m;
  proxy_http_version 1.1;
  proxy_set_header Connection "";
  proxy_set_header Host $host;
  proxy_request_buffering off;
  proxy_buffering off;
  proxy_read_timeout 120s;
  proxy_send_timeout 120s;

  server {
    listen @port ssl;
    ssl_client_certificate ca.crt;
    ssl_verify_client on;
    ssl_verify_depth 1;
    limit_conn connections 64;
    limit_req zone=requests burst=600 nodelay;
    location / { return 404; }
    location /v1/fleet/ {
      if ($fleet_guest = 0) { return 403; }
      client_max_body_size 2g;  # a message's arrays travel as one; Flower's own limit is the same
      # With its path, so that what goes on always begins like this, whatever dots the request held.
      proxy_pass http://superlink/v1/fleet/;
    }
    location /v1/control/ {
      if ($control_guest = 0) { return 403; }
      client_max_body_size 16m;  # an app's bundle has 10 MB at most
      proxy_read_timeout 1h;     # a run's log comes over one request
      proxy_pass http://superlink/v1/control/;
    }
  }

  server {
    listen 127.0.0.1:@internal_port ssl;
    location / { return 404; }
    location /v1/runtime/ {
      client_max_body_size 2g;
      proxy_pass http://superlink/v1/runtime/;
    }
  }
}
"""

SERVER_YAML = """\
# What the server is to the others.
address: @address
port: @port
"""

SERVER_COMPOSE = f"""\
services:
  superlink:
    build: .
    command: sh superlink.sh
    ports: ["@port:@port"]
{SAFE}  superexec:
    build: .
    command: sh superexec.sh
    network_mode: "service:superlink"
{SAFE}  proxy:
    image: nginx:stable
    command: sh /kit/proxy.sh
    network_mode: "service:superlink"
{SAFE}"""

SERVER_README = """\
# The server's kit

Sites and operators reach the server at @address:@port, which only the proxy opens.

1. Start the SuperLink, what runs its side of the training, and the proxy (nginx): `sh start.sh`, as an
   account that nobody else uses. For good: copy the `.service` files to /etc/systemd/system (they expect this
   folder as /opt/fedfrozen/server, the package in /opt/fedfrozen/venv or system-wide, and a user
   `fedfrozen`), or `docker compose up --build`.
2. Let the parties in, with the certificates that the authority sends you (`node.crt` of a site,
   `operator.crt` of a person): `fedfrozen server admit . FILE.crt`; after a renewal, the new one.
3. Runs are started by operators, with their own kit: see its README. `fedfrozen server revoke . NAME` turns a
   site or an operator away at once.

Renew this kit's certificate before it ends: `fedfrozen site renew .`, send `server.csr` to the authority, and
`fedfrozen site install RECEIVED .`; then restart SuperLink and proxy.

`server.key` and `superexec.secret` stay here, readable by their owner alone. Whoever is root here, or has
this account, can start runs: Flower's Control API asks nobody who comes by the socket.
"""

SERVER = {
    "superlink.sh": SUPERLINK,
    "superexec.sh": SUPEREXEC,
    "proxy.sh": PROXY,
    "start.sh": START.format(parts="superlink proxy superexec"),
    "nginx.conf": NGINX,
    "server.yaml": SERVER_YAML,
    "fedfrozen-superlink.service": unit("SuperLink", "server", "/bin/sh superlink.sh"),
    "fedfrozen-superexec.service": unit("SuperExec", "server", "/bin/sh superexec.sh").replace(
        "PrivateDevices=yes", "# devices stay: the server evaluates on a GPU where there is one"
    ),
    "fedfrozen-proxy.service": unit(
        "proxy",
        "server",
        "/bin/sh proxy.sh",
        capabilities="CAP_NET_BIND_SERVICE",  # for a port like 443
    ),
    "Dockerfile": DOCKERFILE,
    "docker-compose.yaml": SERVER_COMPOSE,
    "README.md": SERVER_README,
}

# An operator ---------------------------------------------------------------------------------------------

OPERATOR_YAML = """\
# Read by `fedfrozen runtime=deployed runtime.server_kit=THIS_FOLDER`.
server: @superlink
"""

OPERATOR_README = """\
# The kit of the operator @name

With it runs are started and stopped: `operator.key` is worth as much as that. Once the server has admitted
`operator.crt`, on the server's machine (results are written there), with a folder of test data:

    fedfrozen runtime=deployed runtime.server_kit="$PWD" runtime.min_nodes=2 dataset=images dataset.path=DIR

The account that runs the server must be able to write `output_dir`. After a crash: `fedfrozen resume RUN`.

Renew the certificate before it ends: `fedfrozen site renew .`, send `@name.csr` to the authority, and
`fedfrozen site install RECEIVED .`; the server admits the new `operator.crt`.
"""

OPERATOR = {"operator.yaml": OPERATOR_YAML, "README.md": OPERATOR_README}

# A site --------------------------------------------------------------------------------------------------

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
# What of this site's data a run may train on, by name. A run names a view; rows, columns, classes and whom
# epsilon protects are said here alone. kind: digits | images | parquet | text | conll | brat | i2b2 | mimic |
# dicom | nifti | omop (path: a database, query: the cohort as a SELECT);
# path: relative to this folder; classes: those that all sites have agreed on, and no run begins without them
# (`fedfrozen site check .` tells those found here); unit: example | document | patient, with its unit_column;
# examples: the number of rows that the server is told (without it, the true one rounded to tens).
views:
  main: @data
model_path: null       # folder of a pretrained model, where runs start from one (model=checkpoint)
# match_key: words that all sites have agreed on, and the server does not know: by it the sites' rows are
# compared in a census, where census_matches of policy.yaml allows it.
match_key: null
folder: var            # cache, state and audit.jsonl; needs room for some copies of the model
cache_gb: 4            # of arrays kept between rounds
# Seconds after which a part of this site counts as hung and is started again: without a piece of a message
# coming or going; at work on a message without computing; at work on one message at all.
limits: {transfer: 300, idle: 300, training: 86400}
"""

POLICY_YAML = """\
# What this site allows, whatever the server asks. Changes count from the next message on.
strategies: @strategies   # names that a run may use
# SHA-256 of the app bundles that a run may have; any: each one. The bundle's own code is never run here.
bundles: [@bundle]
upload_roles: @roles   # what may leave, by role
min_examples: 50                           # an update from fewer rows would tell too much
min_people: 20                             # counted where the view's unit is patient; else rows
secure_aggregation: optional               # required: only runs in which the server sees sums over sites
min_cohort: 3                              # of so many sites at least
privacy_required: @private                 # refuse runs without differential privacy
max_epsilon: @epsilon                      # of all private runs together
max_delta: 1.0e-5                          # of all private runs together
approval: @approval                        # ask: a person approves each run (site pending); policy: nobody
metrics: @metrics                          # whether losses and accuracies leave too; without privacy_required
rounds_per_day: @rounds
hellos_per_day: 50
judgements_per_day: 10
refusals_per_day: 100                      # refusals and failures; then nothing is answered for a day
# Before training, a server may ask what data there are (docs: census). yes, no, or ask: a person decides.
census: @census
census_floor: 10                           # people in a cell that is told; smaller ones are hidden
census_columns: {}                         # {age: [0, 18, 40, 65, 120], sex: [F, M]}: edges, or words
census_matches: false                      # hashes of rows, under the match_key of site.yaml
censuses_per_day: 20
subgroups: []                              # columns by which a model is judged apart: [sex, age_band]
downloads: false                           # models or data from the Hugging Face hub
"""

# A site that joins for real begins with little, and its steward allows more; a try shall simply run.
POLICY_STRICT = {
    "strategies": "[fedfrozen]",
    "roles": "[value, output, mlp, norm, head]",
    "private": "true",
    "epsilon": "3.0",
    "rounds": "100",
    "approval": "ask",
    "metrics": "false",
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
yours; the others are signed by the federation's authority and stay as they are (own settings for the
processes belong into a systemd drop-in). Then three commands:

1. `fedfrozen site check .` tells whether all is in order: files, certificate, TLS, key, data, disk, policy,
   and whether SuperNode and executor answer.
2. `sh start.sh` joins the federation. For good: copy the `.service` files to /etc/systemd/system (they expect
   this folder as /opt/fedfrozen/@name, the package in /opt/fedfrozen/venv or system-wide, and a user
   `fedfrozen`), or `docker compose up --build`.
3. `fedfrozen site audit .` shows what was asked, what was sent and what was refused; `fedfrozen site
   pending .` which runs wait for you, `site show HASH .` what one asks for; `site approve HASH .` lets it in.

`node.key` is this site's identity and was made here; `link.pem`, made at the first start, is how the two
processes know each other. Neither leaves this folder.

Renew the certificate before it ends (`site check` says when): `fedfrozen site renew .`, send `@name.csr` to
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
    "site.yaml": SITE_YAML,
    "policy.yaml": POLICY_YAML,
    "fedfrozen-supernode.service": unit("SuperNode", "@name", "/bin/sh supernode.sh"),
    "fedfrozen-executor.service": unit("executor", "@name", "/bin/sh executor.sh", more=NO_NETWORK),
    "Dockerfile": DOCKERFILE,
    "docker-compose.yaml": SITE_COMPOSE,
    "README.md": SITE_README,
}
