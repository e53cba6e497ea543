#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One prefill engine, one decode engine and the proxy on this machine, in plain shell: what `tidal demo` does in Python.
#
#   examples/pd_pair.sh MODEL_DIR [PROMPT]
#
# MODEL_DIR can be made with: tidal make-model MODEL_DIR
# Each engine could as well be started with vLLM's own command line; `tidal serve ... --print` shows it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"

model=${1:?usage: examples/pd_pair.sh MODEL_DIR [PROMPT]}
prompt=${2:-The tide comes in, the tide goes out.}
logs=$(mktemp -d)
common=(--model "$model" --served-model-name pair --dtype float32 --enforce-eager --max-model-len 4096 --max-num-seqs 8
    --kv-cache-memory-bytes 268435456)

trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null || true; wait; echo "logs: $logs"' EXIT
tidal serve prefill --config configs/prefill.toml -- "${common[@]}" --port 8100 >"$logs/prefill.log" 2>&1 &
tidal serve decode --config configs/decode.toml -- "${common[@]}" --port 8200 >"$logs/decode.log" 2>&1 &
tidal proxy --config configs/proxy.toml >"$logs/proxy.log" 2>&1 &

printf 'waiting for both engines '
until curl -fsS -o /dev/null http://127.0.0.1:8000/health 2>/dev/null; do
    if ((SECONDS > 180)); then echo "not ready after 180 s"; tail -n 20 "$logs"/*.log; exit 1; fi
    if [ "$(jobs -rp | wc -l)" -lt 3 ]; then echo "a process ended early"; tail -n 20 "$logs"/*.log; exit 1; fi
    printf .
    sleep 1
done
echo

curl -fsS http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \
    -d "$(python -c 'import json, sys; print(json.dumps(dict(model="pair", prompt=sys.argv[1], max_tokens=16, temperature=0)))' "$prompt")"
echo
echo "what prefill pushed:"
curl -fsS http://127.0.0.1:8100/metrics | grep '^tidal:bytes_pushed' || true
