"""Templates shared by all kits. Provisioning fills in `@name` and copies everything else unchanged.

Every Flower flag below is one that the installed Flower takes: a test asks its own parsers.
"""

import string
from pathlib import Path


class Filled(string.Template):
    delimiter = "@"  # `$` is the shell's
    idpattern = (
        r"\b(?:name|superlink|port|data|bundle|address|internal_port|"
        r"strategies|roles|private|epsilon|rounds|approval|metrics_port|metrics|monitoring|census)\b"
    )


QUIET = """\
export FLWR_TELEMETRY_ENABLED=0   # Flower would report its use otherwise
export FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_HOME="$PWD/flwr"
umask 077
"""

# For a Prometheus on the party's own machine, and for Grafana.
MONITORING = {
    file: (Path(__file__).parent / "monitoring" / file).read_text("utf-8")
    for file in ("alerts.yml", "prometheus.yml", "dashboard.json")
}

METRICS = """\
#!/bin/sh
# Numbers for a Prometheus on this machine, on 127.0.0.1 alone: prometheus.yml reads them.
set -eu
cd "$(dirname "$0")"
{exports}exec fedfrozen {party} metrics . --port @metrics_port
"""

START = """\
#!/bin/sh
# All processes in one terminal; they end together. In production, use the systemd units.
set -u
cd "$(dirname "$0")"
children=
for part in {parts}; do
  sh $part.sh & children="$children $!"
done
end() {{
  trap - INT TERM
  kill $children 2> /dev/null   # only those that it started
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

# For every unit: it can write its own kit and nothing else, and gains no privileges.
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
WITH_NETWORK = "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6\nPrivateDevices=yes"
# The executor reads what the server sends and has the data: it gets no network at all. Devices stay
# available, for a GPU. (With `downloads: true` in the policy it needs a network: `systemctl edit` overrides
# these three lines.)
NO_NETWORK = "PrivateNetwork=yes\nIPAddressDeny=any\nRestrictAddressFamilies=AF_UNIX"


def unit(what: str, folder: str, command: str, *, more: str = WITH_NETWORK, capabilities: str = "") -> str:
    return UNIT.format(what=what, folder=folder, command=command, more=more, capabilities=capabilities)


DOCKERFILE = """\
# Put the fedfrozen wheel into wheels/ next to this file, then:
#   UID=$(id -u) GID=$(id -g) docker compose up --build
FROM python:3.11-slim
COPY wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl
WORKDIR /kit
USER 1000:1000
"""

# For every service: no root, no added privileges, and a file system that is read-only except for the kit.
SAFE = """\
    user: "${UID:-1000}:${GID:-1000}"   # the owner of this folder
    volumes: ["./:/kit"]
    cap_drop: [ALL]
    security_opt: ["no-new-privileges:true"]
    read_only: true
    tmpfs: ["/tmp"]
    restart: always
"""
