#!/bin/sh
# `make docker-test`: the image on a Debian made by hand, compose with the profile cpu, one smoke round through the
# deployment to its report, and what only a running container can prove. Needs root (or the group docker, where the base
# was made), a Docker daemon, compose 2 and debootstrap; no registry of images. Takes 10 to 30 minutes the first time.
# KEEP=FOLDER leaves all of it running, with its settings in that folder: a second call goes on with it. BUILT=1 takes the
# images that are there. TEST_CPUS=0,1 and TEST_THREADS=2 bind the containers to processors.
set -eu
cd "$(dirname "$0")/../.."
BASE=trace-test-base
IMAGE=trace-agent:0.1.0
export TRACE_TARGET=shop COMPOSE_PROFILES=cpu
say() { echo "== $*"; }
fail() { echo "error: $*" >&2; exit 1; }

command -v docker >/dev/null || fail "there is no docker command; install Docker (Debian: apt-get install docker.io)"
docker info >/dev/null 2>&1 || fail "the Docker daemon does not answer ('docker info' says why); start it"
docker compose version >/dev/null 2>&1 || fail "there is no 'docker compose' (version 2); install its plugin"
command -v curl >/dev/null || fail "there is no curl; install it"
ls docker/wheels/torch-*.whl >/dev/null 2>&1 || fail "docker/wheels holds no CPU wheel of torch, and the CUDA build is several GB; put one there (pip download --no-deps -d docker/wheels torch==2.13.0, where pip is shown a CPU build)"

work=${KEEP:-$(mktemp -d)}
mkdir -p -m 700 "$work"
compose() {
    docker compose -p trace-test --env-file "$work/env" -f docker/compose.yaml -f docker/test/compose.yaml "$@"
}
inside() { compose exec -T "$@"; }
finish() {
    code=$?
    if [ -n "${KEEP:-}" ]; then
        echo "left running; its settings lie in $work"
    else
        [ "$code" = 0 ] || compose logs --no-color --tail 25 2>/dev/null || true
        compose down --volumes --timeout 20 >/dev/null 2>&1 || true
        rm -rf "$work"
    fi
    exit "$code"
}
trap finish EXIT
trap 'exit 130' INT TERM

if ! docker image inspect "$BASE" >/dev/null 2>&1; then
    say "base: Debian bookworm by debootstrap"
    command -v debootstrap >/dev/null || fail "there is no debootstrap; apt-get install debootstrap"
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$work/base" >"$work/log" 2>&1 ||
        fail "debootstrap failed: $(tail -n 3 "$work/log")"
    # A machine behind an inspecting proxy trusts more than Debian does; so must what is built on it.
    if ls /usr/local/share/ca-certificates/*.crt >/dev/null 2>&1; then
        cp /usr/local/share/ca-certificates/*.crt "$work/base/usr/local/share/ca-certificates/"
        chroot "$work/base" update-ca-certificates >/dev/null 2>&1
    fi
    tar -C "$work/base" --exclude=./var/cache/apt/archives/*.deb -c . | docker import - "$BASE" >/dev/null
    rm -rf "$work/base"
fi

say "images"
began=$(date +%s)
[ "${BUILT:-0}" = 1 ] || make --no-print-directory image ARGS="-q --network host --build-arg BASE_IMAGE=$BASE" >/dev/null
for name in postgres caddy; do
    [ "${BUILT:-0}" = 1 ] || docker build -q --network host --build-arg BASE_IMAGE="$BASE" --target "$name" -t "trace-test-$name" docker/test >/dev/null
done
commit=$(docker image inspect --format '{{index .Config.Labels "org.opencontainers.image.revision"}}' "$IMAGE")
echo "there after $(($(date +%s) - began)) s; $IMAGE says commit $commit, $(docker image inspect --format '{{.Size}}' "$IMAGE" | cut -c1-4) MB"

export TEST_KEYS="$work/keys"
if ! [ -f "$work/env" ]; then
    # With what would break a URL or a shell line, were the password in one.
    printf '%s@:/ #' "$(head -c 12 /dev/urandom | base64)" >"$work/password"
    head -c 18 /dev/urandom | base64 >"$work/login"
    mkdir -m 755 "$work/keys"
    docker run --rm "$IMAGE" trace-agent key test >"$work/keys/keys.toml" 2>"$work/key"
    chmod 644 "$work/keys/keys.toml"
    hash=$(docker run --rm -i trace-test-caddy caddy hash-password <"$work/login" 2>/dev/null | tail -n 1)
    # Ports: 25432, 24200, 25000, 28000, 28900.
    sed "s|^POSTGRES_PASSWORD=.*|POSTGRES_PASSWORD='$(cat "$work/password")'|; s|^PROXY_HASH=.*|PROXY_HASH='$hash'|
         s|^TRACE_PROFILE=.*|TRACE_PROFILE=smoke|; s|^\([A-Z]*_PORT\)=\(.*\)|\1=2\2|" docker/.env.example >"$work/env"
fi
password=$(cat "$work/password") login=$(cat "$work/login") key=$(sed 's/.*: //' "$work/key" | tail -n 1)

say "compose up, profile cpu"
began=$(date +%s)
compose up -d --no-build --quiet-pull >"$work/log" 2>&1 || { cat "$work/log"; fail "compose did not start"; }
echo "up after $(($(date +%s) - began)) s"
compose ps --all --format '{{.Service}} {{.State}} {{.Health}}' | sort

say "the sandbox in the worker"
inside worker python -c "
from environments.sandbox.workers import ModuleError, Worker, choose_level
level = choose_level()
worker = Worker('def add(a, b): return a + b\ndef peek(): return open(\"/etc/passwd\").read()', level)
print('level', level, '- 2 + 3 =', worker.call('add', [2, 3]))
try:
    raise SystemExit('it read /etc/passwd: ' + worker.call('peek'))
except Exception as problem:
    print('reading /etc/passwd:', problem)
"

say "no password on a command line"
for id in $(compose ps -q --all); do
    if { docker inspect --format '{{json .Path}} {{json .Args}} {{json .Config.Cmd}} {{json .Config.Labels}}' "$id"
         docker top "$id" -eo pid,args 2>/dev/null || true; } | grep -qF -e "$password" -e "$login" -e "$key"; then
        fail "a password stands on a command line of $(docker inspect --format '{{.Name}}' "$id")"
    fi
done
echo "none, in $(compose ps -q --all | wc -l) containers"

say "a smoke round through the deployment"
if ! inside worker trace-agent rounds | grep -q ' done '; then
    began=$(date +%s)
    inside worker prefect deployment run improve/improve --watch --watch-timeout 3600 >"$work/log" 2>&1 ||
        { tail -n 40 "$work/log"; fail "the flow run did not complete"; }
    echo "completed after $(($(date +%s) - began)) s"
fi
inside worker trace-agent rounds
report=$(inside worker trace-agent report | tr -d '\r')
echo "report: $report, $(inside worker sh -c "wc -c < '$report'") bytes"
inside worker trace-agent show "$(basename "$(dirname "$report")")" | grep -E '^ *(code_version|state):'

say "the gateway and the door"
tries=0
until curl -fsS -o /dev/null http://127.0.0.1:28900/health 2>/dev/null; do
    tries=$((tries + 1))
    [ "$tries" -lt 120 ] || fail "the gateway did not answer within 4 minutes"
    sleep 2
done
ask() { curl -s -o "$work/answer" -w '%{http_code}' "$@"; }
body='{"model": "trace", "max_tokens": 16, "messages": [{"role": "user", "content": "Refund 7 of order 264."}]}'
chat="http://127.0.0.1:28900/v1/chat/completions"
echo "gateway without a key: $(ask -H 'content-type: application/json' -d "$body" $chat)"
status=$(ask -H 'content-type: application/json' -H @- -d "$body" $chat <<HEADER
authorization: Bearer $key
HEADER
)
[ "$status" = 200 ] || fail "the gateway answers $status with a key: $(cat "$work/answer")"
echo "gateway with one: $status $(cut -c1-160 "$work/answer")"
for port in 24200/api/health 25000/health; do
    echo "door :$port without the password: $(ask "http://127.0.0.1:$port"), with it: $(printf 'user = "trace:%s"\n' "$login" | ask -K - "http://127.0.0.1:$port")"
done
say "done"
