#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A rollout in plain shell: a cluster is started, upgraded while clients ask, its agent killed on the way, a bad revision
# refused, and the last good one brought back. Engines without a model take part (they start in a second); with real
# ones only `command` in the file below becomes `model` and `vllm`.
#
#   examples/rollout.sh [REGISTRY [LISTEN]]
#
# About a minute. REGISTRY: such as etcd://127.0.0.1:2379; a folder where not said. LISTEN: HOST:PORT of the proxy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"

work=$(mktemp -d)
registry=${1:-file://$work/registry}
where=(--registry "$registry")
listen=${2:-127.0.0.1:8090}
say() { printf '\n== %s\n' "$*"; }

# revision NAME [STANDIN_OPTION...] writes a cluster's file
revision() {
    local name=$1 role
    shift
    {
        printf '[cluster]\ndrain_deadline_s = 30\nready_deadline_s = 10\n'
        printf '[cluster.registry]\nurl = "%s"\n' "$registry"
        for role in prefill decode; do
            printf '[[group]]\nrole = "%s"\ncount = 2\nnodes = ["here"]\nvllm = ["--served-model-name", "demo"]\n' $role
            printf 'environment = { REVISION = "%s" }\n' "$name"
            printf 'command = ["python", "-m", "tidal_connector.cluster.standin"'
            for option in "$@"; do printf ', "%s"' "$option"; done
            printf ']\n'
        done
    } >"$work/$name.toml"
}

start_agent() {
    tidal agent "${where[@]}" --node here --host 127.0.0.1 --state "$work/agent" >>"$work/agent.log" 2>&1 &
    agent=$!
}

ask() {
    curl -fsS --max-time 30 -o /dev/null "http://$listen/v1/completions" -H 'content-type: application/json' \
        -d '{"model": "demo", "prompt": "The tide comes in", "max_tokens": 8}'
}

clients() {
    local good=0 bad=0
    trap 'echo "$good $bad" >"$work/clients"; exit 0' TERM
    while :; do
        if ask 2>>"$work/clients.log"; then good=$((good + 1)); else bad=$((bad + 1)); fi
    done
}

finish() {
    trap - EXIT
    say "ending everything"
    revision empty
    sed -i 's/^count = 2/count = 0/' "$work/empty.toml"
    tidal rollout status "${where[@]}" --wait --timeout 60 >/dev/null 2>&1 || true
    tidal rollout apply "$work/empty.toml" --wait --timeout 60 >/dev/null 2>&1 || true
    kill $(jobs -p) 2>/dev/null || true
    wait
    rm -rf "$work"
}
trap finish EXIT

revision one
revision two
revision bad --never-ready

say "an agent, a proxy, and revision one"
start_agent
tidal proxy "${where[@]}" --listen $listen >"$work/proxy.log" 2>&1 &
tidal rollout apply "$work/one.toml" --wait
until ask 2>/dev/null; do sleep 0.2; done
clients &
client=$!

say "revision two, while a client asks; the agent is killed with -9 on the way and comes back"
tidal rollout apply "$work/two.toml" >/dev/null
sleep 3
kill -9 $agent
sleep 1
start_agent
tidal rollout status "${where[@]}" --wait

say "a second operator, at the same moment as a first one"
tidal rollout apply "$work/bad.toml" >/dev/null
tidal rollout apply "$work/one.toml" || echo "exit status $?"

say "a revision that never becomes ready halts; the others serve on"
tidal rollout status "${where[@]}" --wait || echo "exit status $?"

say "back to the revision before"
tidal rollout undo "${where[@]}" --wait

say "what was done"
tidal rollout history "${where[@]}"
kill -TERM $client
wait $client 2>/dev/null || true
read -r good bad <"$work/clients"
echo "the client meanwhile: $good answers, $bad failures"
[ "$bad" -eq 0 ]
