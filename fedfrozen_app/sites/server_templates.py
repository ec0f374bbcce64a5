"""The files of the server's kit."""

from fedfrozen_app.sites.kit_templates import DOCKERFILE, METRICS, MONITORING, QUIET, SAFE, START, unit

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
PATH="$PATH:/usr/local/sbin:/usr/sbin"   # where nginx is, and an account's own PATH may not lead
if ! command -v nginx > /dev/null; then
  echo "nginx is not installed, and it is the only door to this server: install it (apt install nginx)." >&2
  exit 2
fi
touch admitted.conf   # empty at first
if [ "$(id -u)" = 0 ]; then
  exec nginx -p "$PWD" -c nginx.conf -g 'user root;'   # else its workers would run as another user
fi
exec nginx -p "$PWD" -c nginx.conf
"""

NGINX = """\
# The only door to the SuperLink, which listens at a socket. Each of Flower's three APIs has its own clients:
#   Fleet    the sites, by their certificates (Flower asks for their keys as well)
#   Control  the operators, by theirs: Flower itself authenticates nobody there, and it can start runs
#   Runtime  the server's own processes, on 127.0.0.1 alone (Flower asks for superexec.secret, then tokens)
# admitted.conf lists the admitted certificates by serial number: `fedfrozen server admit|revoke`.
# Start it with proxy.sh, from this folder.
daemon off;
pid nginx.pid;
error_log stderr warn;
worker_processes 1;
worker_rlimit_nofile 16384;
events { worker_connections 4096; }
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

  # Flower holds a request in memory before it checks the node's key: a party may send few large ones at once.
  map $content_length $size { default small; "~^[0-9]{8,}$" large; }   # from 10 MB
  map $http_transfer_encoding $kind { default large; "" $size; }       # of unknown length
  map $kind $large_request_of { default ""; large $ssl_client_serial; }

  # No party, even with a valid certificate, may keep the server from answering the others.
  limit_conn_zone $binary_remote_addr zone=connections:1m;
  limit_conn_zone $large_request_of zone=large:1m;
  limit_req_zone $ssl_client_serial zone=requests:1m rate=300r/s;
  limit_conn_status 429;
  limit_req_status 429;
  client_header_timeout 10s;
  client_body_timeout 60s;
  send_timeout 60s;
  keepalive_timeout 75s;
  keepalive_time 10m;  # then the certificate is checked again
  reset_timedout_connection on;
  large_client_header_buffers 4 8k;

  ssl_certificate server.crt;
  ssl_certificate_key server.key;
  ssl_protocols TLSv1.2 TLSv1.3;
  # A resumed session would skip the check of its certificate, which may have expired since.
  ssl_session_cache off;
  ssl_session_tickets off;
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
    limit_conn large 2;
    limit_req zone=requests burst=600 nodelay;
    location / { return 404; }
    location /v1/fleet/ {
      if ($fleet_guest = 0) { return 403; }
      client_max_body_size 2g;  # a message's arrays travel as one; Flower's own limit is the same
      # With the path, so that the forwarded path always starts like this, whatever dots the request held.
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
# The address of the server, as sites and operators reach it.
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

1. Start the SuperLink, the SuperExec (the server's side of training) and the proxy (nginx): `sh start.sh`,
   under a dedicated account. As a service: copy the `.service` files to /etc/systemd/system (they expect this
   folder as /opt/fedfrozen/server, the package in /opt/fedfrozen/venv or system-wide, and a user
   `fedfrozen`), or `docker compose up --build`.
2. Admit the parties, with the certificates that the authority sends you (`node.crt` of a site,
   `operator.crt` of a person): `fedfrozen server admit . FILE.crt`; after a renewal, the new one.
3. Runs are started by operators, with their own kit: see its README. `fedfrozen server revoke . NAME` revokes
   a site or an operator at once.

`sh metrics.sh` shows numbers to a Prometheus on this machine: `prometheus.yml`, `alerts.yml`, and
`dashboard.json` for Grafana.

Renew this kit's certificate before it ends: `fedfrozen site renew .`, send `server.csr` to the authority, and
`fedfrozen site install RECEIVED .`; then restart SuperLink and proxy.

`server.key` and `superexec.secret` stay here, readable by their owner alone. Whoever is root here, or has
this account, can start runs: Flower's Control API does not authenticate on the socket.
"""

SERVER = {
    "superlink.sh": SUPERLINK,
    "superexec.sh": SUPEREXEC,
    "proxy.sh": PROXY,
    "start.sh": START.format(parts="superlink proxy superexec"),
    "metrics.sh": METRICS.format(exports=QUIET, party="server"),
    **MONITORING,
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
    "fedfrozen-metrics.service": unit("numbers for Prometheus", "server", "/bin/sh metrics.sh"),
    "Dockerfile": DOCKERFILE,
    "docker-compose.yaml": SERVER_COMPOSE,
    "README.md": SERVER_README,
}
