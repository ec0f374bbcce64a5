"""The files of a kit. `@name` is filled in by provisioning; all else is as it will stand there.

Every Flower flag below is one that the installed Flower takes: a test asks its own parsers.
"""

import string


class Filled(string.Template):
    delimiter = "@"  # `$` is the shell's
    idpattern = r"\b(?:name|superlink|port|data|bundle|address|internal_port|sites|count)\b"


QUIET = """\
export FLWR_TELEMETRY_ENABLED=0   # Flower would report its use otherwise
export FLWR_DISABLE_UPDATE_CHECK=1
"""

# The server ----------------------------------------------------------------------------------------------

ENVIRONMENT = f"""\
# Read by the other scripts: how Flower's commands find this SuperLink.
{QUIET}export FLWR_HOME="$PWD/flwr"
mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml" <<END
[superlink.federation]
address = "127.0.0.1:@internal_port"
root-certificates = "$PWD/ca.crt"
END
"""

SUPERLINK = """\
#!/bin/sh
# The meeting point. It listens on this machine alone: the proxy lets the sites in, to the Fleet API only.
set -eu
cd "$(dirname "$0")"
. ./environment.sh
exec flower-superlink --host 127.0.0.1 --port @internal_port --isolation process \\
  --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key \\
  --enable-supernode-auth --database state.db \\
  --superexec-auth-secret-file superexec.secret --disable-runtime-dependency-installation
"""

SUPEREXEC = """\
#!/bin/sh
# Starts the server's side of each run.
set -eu
cd "$(dirname "$0")"
. ./environment.sh
exec flower-superexec --runtime-api-address 127.0.0.1:@internal_port --root-certificates ca.crt \\
  --superexec-auth-secret-file superexec.secret
"""

START = """\
#!/bin/sh
# Both processes in one terminal; they end together. For good, use the systemd units.
set -eu
cd "$(dirname "$0")"
for part in {first} {second}; do
  (sh $part.sh || true; kill 0) &
done
trap 'trap - INT TERM; kill 0' INT TERM   # only now: a child that began with it would outlive a signal
wait
"""

REGISTER = """\
#!/bin/sh
# Tell the running SuperLink the sites' public keys. A key that it knows already is reported and passed over.
set -u
cd "$(dirname "$0")"
. ./environment.sh
failed=0
for key in sites/*.pub; do
  site=$(basename "$key" .pub)
  answer=$(flwr supernode register "$key" federation --name "$site" --format json 2>&1) || true
  case "$answer" in
    *'"success": true'*)
      echo "$answer" | grep -o '"node-id": "*[0-9]*' | grep -o '[0-9]*$' >> "sites/$site.id"
      echo "$site: registered" ;;
    *already*) echo "$site: registered before" ;;
    *) echo "$site: NOT registered: $answer"; failed=1 ;;
  esac
done
exit $failed
"""

REVOKE = """\
#!/bin/sh
# sh revoke.sh NAME: the site's key is forgotten at once; its SuperNode is turned away from then on.
set -eu
cd "$(dirname "$0")"
. ./environment.sh
site=${1:?say which site: sh revoke.sh NAME}
# Flower's list tells no names: register.sh wrote the ids down, one for each key the site has had.
[ -s "sites/$site.id" ] || { echo "No site $site is registered."; exit 1; }
while read -r id; do
  flwr supernode unregister "$id" federation < /dev/null
done < "sites/$site.id"
rm -f "sites/$site.id" "sites/$site.pub"
echo "$site: revoked. Take it out of federation.yaml too, or provisioning brings its key back."
"""

NGINX = """\
# The only door: nginx forwards the Fleet API, which asks for a registered key, and nothing else. Flower's
# Control API shares the SuperLink's port and asks for nothing: whoever reached it could start a run anywhere.
# Start it from this folder: nginx -p "$PWD" -c nginx.conf
daemon off;
pid nginx.pid;
error_log stderr warn;
events {}
http {
  access_log off;
  client_body_temp_path nginx-body;
  proxy_temp_path nginx-proxy;
  fastcgi_temp_path nginx-fastcgi;
  uwsgi_temp_path nginx-uwsgi;
  scgi_temp_path nginx-scgi;
  upstream superlink {
    server 127.0.0.1:@internal_port;
    keepalive 32;  # a round is hundreds of small requests: a handshake for each would cost more than they do
  }
  server {
    listen @port ssl;
    ssl_certificate server.crt;
    ssl_certificate_key server.key;
    ssl_protocols TLSv1.2 TLSv1.3;
    client_max_body_size 0;
    location / { return 404; }
    location /v1/fleet/ {
      # With its path, so that what goes on always begins like this, whatever dots the request held.
      proxy_pass https://superlink/v1/fleet/;
      proxy_ssl_trusted_certificate ca.crt;
      proxy_ssl_verify on;
      proxy_ssl_name localhost;
      proxy_ssl_session_reuse on;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $host;
      proxy_request_buffering off;
      proxy_buffering off;
      proxy_read_timeout 120s;
      proxy_send_timeout 120s;
    }
  }
}
"""

SERVER_YAML = """\
# Read by `fedfrozen runtime=deployed runtime.server_kit=THIS_FOLDER`.
superlink: 127.0.0.1:@internal_port
address: @address
port: @port
"""

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
NoNewPrivileges=true
ProtectSystem=full
PrivateTmp=true

[Install]
WantedBy=multi-user.target
"""

DOCKERFILE = """\
# Put the fedfrozen wheel into wheels/ beside this file, then: docker compose up --build
FROM python:3.11-slim
COPY wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl
WORKDIR /kit
"""

SERVER_COMPOSE = """\
services:
  superlink:
    build: .
    command: sh superlink.sh
    volumes: ["./:/kit"]
    ports: ["@port:@port"]
    restart: always
  superexec:
    build: .
    command: sh superexec.sh
    volumes: ["./:/kit"]
    network_mode: "service:superlink"
    restart: always
  proxy:
    image: nginx:stable
    command: nginx -p /kit -c nginx.conf
    volumes: ["./:/kit"]
    network_mode: "service:superlink"
    restart: always
"""

SERVER_README = """\
# The server's kit

Sites: @sites. They reach the server at @address:@port, which only the proxy opens.

1. Start the SuperLink and what runs its side of the training, and the proxy: `sh start.sh` and, in another
   terminal, `nginx -p "$PWD" -c nginx.conf`. For good: copy the `.service` files to /etc/systemd/system (they
   expect this folder as /opt/fedfrozen/server, the package in /opt/fedfrozen/venv or system-wide, and a user
   `fedfrozen`), or `docker compose up --build`, and then each command below as
   `docker compose exec superlink COMMAND`.
2. Let the sites in, once it runs: `sh register.sh`. Again after a new site or a renewed key.
3. Train: `fedfrozen runtime=deployed runtime.server_kit="$PWD" runtime.min_nodes=@count dataset=images
   dataset.path=DIR` with a folder of test pictures. After a crash: `fedfrozen resume RUN`.

Revoke a site: `sh revoke.sh NAME`. Renew the certificate, where the authority's folder is:
`fedfrozen provision federation.yaml -o kits --renew server`, then restart superlink and proxy.

`server.key` and `superexec.secret` stay here, readable by their owner alone. Whoever has an account on this
machine can reach the SuperLink's port on 127.0.0.1 and start runs: give nobody one who may not.
"""

SERVER = {
    "environment.sh": ENVIRONMENT,
    "superlink.sh": SUPERLINK,
    "superexec.sh": SUPEREXEC,
    "start.sh": START.format(first="superlink", second="superexec"),
    "register.sh": REGISTER,
    "revoke.sh": REVOKE,
    "nginx.conf": NGINX,
    "server.yaml": SERVER_YAML,
    "fedfrozen-superlink.service": UNIT.format(
        what="SuperLink", folder="server", command="/bin/sh superlink.sh"
    ),
    "fedfrozen-superexec.service": UNIT.format(
        what="SuperExec", folder="server", command="/bin/sh superexec.sh"
    ),
    "fedfrozen-proxy.service": UNIT.format(
        what="proxy", folder="server", command="/usr/sbin/nginx -p /opt/fedfrozen/server -c nginx.conf"
    ).replace("User=", "AmbientCapabilities=CAP_NET_BIND_SERVICE\nUser="),  # for a port like 443
    "Dockerfile": DOCKERFILE,
    "docker-compose.yaml": SERVER_COMPOSE,
    "README.md": SERVER_README,
}

# A site --------------------------------------------------------------------------------------------------

SUPERNODE = f"""\
#!/bin/sh
# Talks to the server. It opens no port to the outside; the executor meets it on 127.0.0.1:@port.
set -eu
cd "$(dirname "$0")"
{QUIET}export FLWR_HOME="$PWD/flwr"
exec flower-supernode --superlink @superlink --root-certificates ca.crt \\
  --auth-supernode-private-key node.key --isolation process --host 127.0.0.1 --port @port \\
  --superexec-auth-secret-file executor.secret
"""

EXECUTOR = f"""\
#!/bin/sh
# Trains, with the package that is installed here, as far as policy.yaml allows.
set -eu
cd "$(dirname "$0")"
{QUIET}export FLWR_HOME="$PWD/flwr"
exec fedfrozen site exec .
"""

SITE_YAML = """\
# Who this site is and where its data lie. Only this file can name a path; the server never can.
name: @name
superlink: @superlink
port: @port            # on 127.0.0.1: where SuperNode and executor meet
# What of this site's data a run may train on, by name. A run names a view; rows, columns, classes and whom
# epsilon protects are said here alone. kind: digits | images | parquet | text | conll | brat | i2b2 | mimic;
# path: relative to this folder; classes: those that all sites have agreed on, and no run begins without them
# (`fedfrozen site check .` tells those found here); unit: example | document | patient, with its unit_column;
# examples: the number of rows that the server is told (without it, the true one rounded to tens).
views:
  main: @data
model_path: null       # folder of a pretrained model, where runs start from one (model=checkpoint)
folder: var            # cache, state and audit.jsonl; needs room for some copies of the model
cache_gb: 4            # of arrays kept between rounds
"""

POLICY_YAML = """\
# What this site allows, whatever the server asks. Changes count from the next message on.
strategies: [fedavg, fedprox, fedfrozen, safl]   # names that a run may use
# SHA-256 of the app bundles that a run may have; any: each one. The bundle's own code is never run here.
bundles: [@bundle]
upload_roles: [embedding, query, key, value, output, mlp, norm, head]   # what may leave, by role
min_examples: 50                           # an update from fewer rows would tell too much
min_people: 20                             # counted where the view's unit is patient; else rows
privacy_required: false                    # refuse runs without differential privacy
max_epsilon: 8.0                           # of all private runs together
max_delta: 1.0e-5                          # of all private runs together
approval: ask                              # a person approves each run (fedfrozen site pending), or: policy
metrics: false                             # whether losses and accuracies leave too; without privacy_required
rounds_per_day: 500
hellos_per_day: 50
judgements_per_day: 10
refusals_per_day: 100                      # refusals and failures; then nothing is answered for a day
downloads: false                           # models or data from the Hugging Face hub
"""

SITE_COMPOSE = """\
services:
  supernode:
    build: .
    command: sh supernode.sh
    volumes: ["./:/kit"]
    restart: always
  executor:
    build: .
    command: sh executor.sh
    volumes: ["./:/kit"]
    network_mode: "service:supernode"
    restart: always
"""

SITE_README = """\
# The kit of the site @name

Put your data where `site.yaml` says, read `policy.yaml` and change it to what you allow. Then three commands:

1. `fedfrozen site check .` tells whether all is in order: name, TLS, key, data, disk, policy.
2. `sh start.sh` joins the federation. For good: copy the `.service` files to /etc/systemd/system (they expect
   this folder as /opt/fedfrozen/@name, the package in /opt/fedfrozen/venv or system-wide, and a user
   `fedfrozen`), or `docker compose up --build`.
3. `fedfrozen site audit .` shows what was asked, what was sent and what was refused; `fedfrozen site
   pending .` which runs wait for you, `site show HASH .` what one asks for; `site approve HASH .` lets it in.

`node.key` is this site's identity, `executor.secret` ties the two processes together: neither leaves this
folder.

The fallback is Flower's own way: leave out `--isolation process` and the secret in `supernode.sh`, add
`--node-config 'site="@name" data-path="/FOLDER"'`, and start no executor. Every message then starts a
process, **and it runs the code that the server sends, without this policy**: only where you trust it.
"""

SITE = {
    "supernode.sh": SUPERNODE,
    "executor.sh": EXECUTOR,
    "start.sh": START.format(first="supernode", second="executor"),
    "site.yaml": SITE_YAML,
    "policy.yaml": POLICY_YAML,
    "fedfrozen-supernode.service": UNIT.format(
        what="SuperNode", folder="@name", command="/bin/sh supernode.sh"
    ),
    "fedfrozen-executor.service": UNIT.format(what="executor", folder="@name", command="/bin/sh executor.sh"),
    "Dockerfile": DOCKERFILE,
    "docker-compose.yaml": SITE_COMPOSE,
    "README.md": SITE_README,
}
