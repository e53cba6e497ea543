#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# etcd, a prefill engine, a decode engine and the proxy on four machines, played by four network namespaces of this one
# (as root): what has to be written and typed on each, and what then moves between them.
#
#   examples/two_nodes.sh [-6] [-s] [-r RATE] [-m MODEL_DIR] [PROMPT]
#
#   -6  IPv6 in place of IPv4          -r RATE       speed of every link (1gbit)
#   -s  stand-ins in place of vLLM:    -m MODEL_DIR  a checkpoint; without it a small one is made
#       no model, ready in seconds
#
# On real machines leave out everything with `ip` and `tc`, and put the machines' own addresses into the files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"

family=4 rate=1gbit model="" standin=""
while getopts 6sr:m: option; do
    case $option in
    6) family=6 ;;
    s) standin=yes ;;
    r) rate=$OPTARG ;;
    m) model=$OPTARG ;;
    *) sed -n '/^#   /s/^# *//p' "$0" >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
prompt=${1:-The tide comes in, the tide goes out.}

die() { printf 'two_nodes: %s\n' "$*" >&2; exit 1; }
((EUID == 0)) || die "network namespaces need root: sudo examples/two_nodes.sh"
for tool in ip tc etcd curl; do
    command -v $tool >/dev/null || die "$tool is missing; on Debian: apt-get install iproute2 etcd-server curl"
done

nodes=(etcd prefill decode proxy)
bridge=tidal$$b
files=$(mktemp -d)
pids=()

# --- the machines: a namespace each, and a cable of limited speed to a bridge; this shell is on the bridge, too

# A run that was killed with -9 leaves its machines, named by its process id: they go before new ones come.
sweep() {
    local left owner
    for left in $(ip netns list | awk '/^tidal[0-9]+-/ {print $1}') $(ip -br link show type bridge | awk '/^tidal[0-9]+b/ {print $1}'); do
        owner=$(sed -E 's/^tidal([0-9]+).*/\1/' <<<"$left")
        [ -d "/proc/$owner" ] && [ "$owner" != $$ ] && continue
        ip netns pids "$left" 2>/dev/null | xargs -r kill -9 || true
        ip netns delete "$left" 2>/dev/null || ip link delete "$left" 2>/dev/null || true
    done
}

finish() {
    trap - EXIT INT TERM
    ((${#pids[@]} == 0)) || kill "${pids[@]}" 2>/dev/null || true
    for ((i = 0; i < 150; i++)); do
        ((${#pids[@]} > 0)) && kill -0 "${pids[@]}" 2>/dev/null || break
        sleep 0.1
    done
    sweep
    echo "machines are gone; files and logs are in $files"
}
trap finish EXIT
trap 'exit 130' INT TERM
sweep

net=198.19.$(($$ % 250)) net6=fd74:6964:616c:$(printf %x $(($$ % 65536)))
[ $family = 6 ] && mask=64 || mask=24
address() { if [ $family = 6 ]; then echo "$net6::$1"; else echo "$net.$1"; fi; }
at() { if [ $family = 6 ]; then echo "[$(address "$1")]:$2"; else echo "$(address "$1"):$2"; fi; }

ip link add "$bridge" type bridge mcast_snooping 0
ip link set "$bridge" up
ip address add "$(address 254)/$mask" dev "$bridge" $([ $family = 4 ] || echo nodad)
for index in "${!nodes[@]}"; do
    machine=tidal$$-${nodes[index]}
    ip netns add "$machine"
    ip link add "tidal$$v$index" type veth peer name eth0 netns "$machine"
    ip link set "tidal$$v$index" master "$bridge" up
    ip -n "$machine" link set lo up
    ip -n "$machine" link set eth0 up
    ip -n "$machine" address add "$(address $((index + 1)))/$mask" dev eth0 $([ $family = 4 ] || echo nodad)
    tc qdisc add dev "tidal$$v$index" root tbf rate "$rate" burst 256kb latency 100ms
    tc -n "$machine" qdisc add dev eth0 root tbf rate "$rate" burst 256kb latency 100ms
done
echo "machines: etcd $(address 1), prefill $(address 2), decode $(address 3), proxy $(address 4); links of $rate"

# on MACHINE COMMAND...: start a command there, with a log
on() {
    local machine=$1
    shift
    (exec ip netns exec "tidal$$-$machine" "$@" >"$files/$machine.log" 2>&1) &
    pids+=($!)
}

# --- what to write on each of them

registry="etcd://$(at 1 2379)"
stand_in=""
[ -z "$standin" ] || stand_in='command = ["python", "-m", "tidal_connector.cluster.standin"]'
for engine in prefill:2 decode:3; do
    cat >"$files/${engine%:*}.toml" <<TOML
engine = "${engine%:*}-0"
node = "${engine%:*}"
$stand_in
[http]
bind = "$(at "${engine#*:}" 8000)"
[registry]
url = "$registry"
[tidal.control]
bind = "$(at "${engine#*:}" 7100)"
TOML
done
[ -n "$standin" ] || printf '[tidal.pool]\nbytes = "256MiB"\n' >>"$files/decode.toml"
cat >"$files/proxy.toml" <<TOML
listen = "$(at 4 8000)"
[registry]
url = "$registry"
TOML
for file in prefill decode proxy; do
    echo "--- $file.toml"
    grep . "$files/$file.toml"
done
echo ---

# --- what to type on each of them

if [ -z "$model$standin" ]; then
    model=$files/model
    echo "making a small checkpoint ..."
    tidal make-model "$model" >"$files/model.log"
fi
vllm=(--model "${model:-none}" --served-model-name two-nodes --dtype float32 --enforce-eager --max-model-len 4096
    --max-num-seqs 8 --kv-cache-memory-bytes 268435456)
client="http://$(at 1 2379)" peer="http://$(at 1 2380)"
on etcd etcd --name one --data-dir "$files/etcd" --listen-client-urls "$client" --advertise-client-urls "$client" \
    --listen-peer-urls "$peer" --initial-advertise-peer-urls "$peer" --initial-cluster "one=$peer"
on prefill tidal serve prefill --config "$files/prefill.toml" -- "${vllm[@]}"
on decode tidal serve decode --config "$files/decode.toml" -- "${vllm[@]}"
on proxy tidal proxy --config "$files/proxy.toml"

printf 'waiting until the proxy has a pair of engines '
until curl -fsS -o /dev/null --max-time 2 "http://$(at 4 8000)/ready" 2>/dev/null; do
    ((SECONDS < 240)) || { tail -n 20 "$files"/*.log; die "not ready after 240 s"; }
    for pid in "${pids[@]}"; do
        kill -0 "$pid" 2>/dev/null || { tail -n 20 "$files"/*.log; die "a process ended early"; }
    done
    printf .
    sleep 1
done
echo " ${SECONDS} s"
COLUMNS=${COLUMNS:-120} tidal status --registry "$registry" || true

# --- a request through the proxy, and the same one at the prefill engine alone, which moves nothing

ask() {
    curl -fsS --max-time 60 "http://$(at "$1" 8000)/v1/completions" -H 'content-type: application/json' -d "$(python -c '
import json, sys
print(json.dumps(dict(model="two-nodes", prompt=sys.argv[1], max_tokens=16, temperature=0, ignore_eos=True)))' "$prompt")" |
        python -c 'import json, sys; print(repr(json.load(sys.stdin)["choices"][0]["text"]))'
}
received() { ip -n "tidal$$-decode" -s -j link show eth0 | python -c 'import json, sys; print(json.load(sys.stdin)[0]["stats64"]["rx"]["bytes"])'; }
before=$(received)
together=$(ask 4)
after=$(received)
alone=$(ask 2)
echo "prefill and decode: $together"
echo "one engine alone:   $alone"
if [ -z "$standin" ]; then # which move nothing
    pushed=$(curl -fsS --max-time 5 "http://$(at 2 8000)/metrics" | awk '/^tidal:bytes_pushed_total/ {printf "%d", $2}')
    echo "prefill pushed $pushed bytes of KV; decode's link carried $((after - before)), the messages among them"
fi
[ "$together" = "$alone" ] || die "the answers differ"
echo "the answers are the same"
