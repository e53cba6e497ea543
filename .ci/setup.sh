#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv ready: Debian packages, Python packages from requirements/cpu.lock, this package with its native module.
# Idempotent. Each of the three steps is skipped while the stamp of what it depends on is current.
# PYTHON=/path/to/python3.11 chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

lock=requirements/cpu.lock
router_lock=requirements/router.lock
venv=.venv
log=build/setup.log
debian_libraries=(libibverbs1 librdmacm1 libnuma1) # Mooncake does not load without these
debian_services=(etcd-server iproute2)             # the registry, and network namespaces for two-node tests
debian_browser=(chromium)                          # draws the dashboard in its test
torch_index=https://download.pytorch.org/whl/cpu   # where the +cpu builds are published
SECONDS=0

say() { printf 'setup: %s\n' "$*"; }
die() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

digest() { cat -- "$@" | sha256sum | cut -d' ' -f1; }
is_current() { [[ -f "$venv/$1" && "$(<"$venv/$1")" == "$2" ]]; }

packages_in_place() { find "$venv" -maxdepth 4 -name '*.dist-info' 2>/dev/null | wc -l; }

# Runs a command with its output in the log; says every 10 seconds how far it is, and on failure shows the end of the log.
quietly() {
  local what=$1 began=$SECONDS job shown=0
  shift
  say "$what ..."
  printf '\n== %s\n' "$what" >>"$log"
  "$@" >>"$log" 2>&1 </dev/null &
  job=$!
  trap 'kill "$job" 2>/dev/null; exit 130' INT TERM # a background job does not hear Ctrl-C by itself
  while kill -0 "$job" 2>/dev/null; do
    sleep 0.2
    if ((SECONDS - began >= shown + 10)); then
      shown=$((SECONDS - began))
      say "  ... ${shown} s, $(packages_in_place) packages in place"
    fi
  done
  local outcome=0
  wait "$job" || outcome=$?
  trap - INT TERM
  if ((outcome != 0)); then
    tail -n 15 "$log" >&2
    return 1
  fi
  say "  done in $((SECONDS - began)) s"
}

debian_package_of_python() { "$1" -c 'import sys; print("python%d.%d" % sys.version_info[:2])'; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "no Python 3.11, 3.12 or 3.13 found${PYTHON:+ (PYTHON=$PYTHON)}: install python3.11 with its venv and dev packages, or say PYTHON=/path/to/python3.11 make setup"
}

# Installs Debian packages as root; otherwise prints the line that an administrator has to type.
apt_install() {
  local line="apt-get install -y --no-install-recommends $*"
  [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null || die "missing system packages; type this as root, then try again:  $line"
  export DEBIAN_FRONTEND=noninteractive
  quietly "system package lists" apt-get update -qq || say "  the lists could not be renewed; trying with the old ones"
  quietly "system packages $*" apt-get install -y -qq --no-install-recommends "$@" || die "this failed: $line"
}

ensure_debian_packages() {
  local name missing=()
  if ! command -v dpkg-query >/dev/null; then
    say "not a Debian system: ${debian_libraries[*]} ${debian_services[*]} ${debian_browser[*]} (or what they are called here) have to be there"
    return
  fi
  for name in "${debian_libraries[@]}" "${debian_services[@]}" "${debian_browser[@]}"; do
    [[ "$(dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null)" == installed ]] || missing+=("$name")
  done
  "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=("$(debian_package_of_python "$python")-venv")
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    missing+=("$(debian_package_of_python "$python")-dev")
  command -v c++ >/dev/null || command -v g++ >/dev/null || missing+=(g++)
  ((${#missing[@]} == 0)) || apt_install "${missing[@]}"
}

install_torch() {
  local pin
  pin=$(grep -E '^torch==' "$lock")
  "$venv/bin/python" -c 'import sys; from importlib.metadata import version as v; sys.exit("torch==" + v("torch") != sys.argv[1])' \
    "$pin" 2>/dev/null && return
  quietly "$pin" "$venv/bin/pip" install --progress-bar off --no-deps "$pin" && return
  say "  $pin is not in the usual index; asking PyTorch's own"
  quietly "$pin" "$venv/bin/pip" install --progress-bar off --no-deps --index-url "$torch_index" "$pin" ||
    die "torch could not be installed: $pin is needed for $("$venv/bin/python" -V); the log is $log"
}

# Only one end-to-end test needs it, which is skipped without it; so no failure here stops anybody.
install_router() {
  rm -rf "$venv/router"
  quietly "vLLM's router, for a test" "$venv/bin/pip" install --progress-bar off --no-deps --target "$venv/router" -r "$router_lock" ||
    say "  it could not be installed (see above); to try again: $venv/bin/pip install --no-deps --target $venv/router -r $router_lock"
}

python=$(find_python)
packages_key=$(digest "$lock" "$router_lock" .ci/setup.sh)
project_key=$(digest "$lock" pyproject.toml $(find csrc -type f | LC_ALL=C sort))
if is_current .stamp-packages "$packages_key" && is_current .stamp-project "$project_key"; then
  exit 0
fi

mkdir -p build
exec 9>build/.setup.lock
flock 9 # a second make waits here and then finds the work done
: >"$log"
ensure_debian_packages
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # none yet, or its making was interrupted
  quietly "$venv with $("$python" -V)" "$python" -m venv --clear "$venv" || die "no virtual environment could be made in $venv"
fi
if ! is_current .stamp-packages "$packages_key"; then
  install_torch
  count=$(grep -c '==' "$lock")
  quietly "$count locked packages (1 to 3 minutes)" \
    "$venv/bin/pip" install --progress-bar off --no-deps -r "$lock" || die "not every package of $lock could be installed; the log is $log"
  install_router
  printf '%s\n' "$packages_key" >"$venv/.stamp-packages"
fi
if ! is_current .stamp-project "$project_key"; then
  quietly "tidal_connector and its native module" \
    env PATH="$PWD/$venv/bin:$PATH" "$venv/bin/pip" install --no-build-isolation --no-deps -e . ||
    die "tidal_connector did not build; the log is $log"
  printf '%s\n' "$project_key" >"$venv/.stamp-project"
fi
say "ready in ${SECONDS} s"
