#!/bin/sh
# N processes of the service on this machine, and HAProxy before them:
#
#   deploy/scale/serve.sh N [FLAG…]                     flags of `attention serve`, for every process
#   ATTENTION_DEVICE=cuda deploy/scale/serve.sh N       process i has GPU i
#
# Clients reach HAProxy on ATTENTION_HOST and ATTENTION_PORT (127.0.0.1:8000). The processes listen on FIRST_PORT (8001)
# and the ports after it, for this machine alone. Ctrl-C drains and stops all of them.
set -eu

here=$(dirname "$0")
n=${1:?how many processes?}
shift
command -v haproxy >/dev/null || { echo "haproxy is not on PATH; install it (Debian: apt-get install haproxy)" >&2; exit 1; }
[ "$n" -ge 1 ] || { echo "expected one process or more, got $n" >&2; exit 1; }

host=${ATTENTION_HOST:-127.0.0.1} port=${ATTENTION_PORT:-8000} first=${FIRST_PORT:-8001} device=${ATTENTION_DEVICE:-auto}
case $host in
127.* | localhost | ::1) # As for one process, callers of this machine need no key.
	export ATTENTION_REQUIRE_KEYS="${ATTENTION_REQUIRE_KEYS:-false}" ;;
*)
	export ATTENTION_REQUIRE_KEYS="${ATTENTION_REQUIRE_KEYS:-true}" ATTENTION_ALLOWED_HOSTS="${ATTENTION_ALLOWED_HOSTS:-*}" ;;
esac
cores=$(nproc)
export ATTENTION_REPLICAS="$n" ATTENTION_TRUSTED_PROXIES="${ATTENTION_TRUSTED_PROXIES:-127.0.0.1}"
export ATTENTION_THREADS="${ATTENTION_THREADS:-$(((cores + n - 1) / n))}"
export ATTENTION_MAX_CONNECTIONS_PER_ADDRESS="${ATTENTION_MAX_CONNECTIONS_PER_ADDRESS:-4096}"

servers=$(mktemp)
started=
stop() {
	trap - INT TERM EXIT
	rm -f "$servers"
	# shellcheck disable=SC2086 # a list
	kill $started 2>/dev/null || true
	wait
}
trap stop EXIT
trap 'exit 0' INT TERM
i=0 all=
while [ "$i" -lt "$n" ]; do
	case $device in cuda) own=cuda:$i ;; *) own=$device ;; esac
	ATTENTION_HOST=127.0.0.1 ATTENTION_DEVICE=$own attention serve --port $((first + i)) "$@" &
	started="$started $!"
	all="$all $i"
	i=$((i + 1))
done
for backend in attention unchecked; do
	echo "backend $backend from processes"
	case $backend in unchecked) check=no-check ;; *) check=check ;; esac
	for i in $all; do echo "    server attention$i 127.0.0.1:$((first + i)) $check"; done
done >"$servers"
ATTENTION_HOST=$host ATTENTION_PORT=$port haproxy -db -q -f "$here/haproxy.cfg" -f "$servers" &
started="$! $started"
wait "$!"
