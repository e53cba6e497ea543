#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds operators for Ascend NPUs into out/CANN-custom_ops-*.run. Needs CANN 9 with its compiler bisheng, and CMake.
#
#   bash build.sh -n "gather_selection_kv_cache;gather_miss_rows" -c ascend910_93 -p "$ASCEND_HOME_PATH"
#
#   -n, --op-name NAMES         operators, separated by ';' (all)
#   -c, --compute-unit SOC      ascend910b (A2) or ascend910_93 (A3)
#   -p, --package-path CANN     where CANN is installed ($ASCEND_HOME_PATH)
#   -b, --build PART            host, kernel or a target of CMake, instead of the package
#       --ops-compile-options X more options for the kernels, separated by ';'
#       --op_debug_config X     options of CANN's compiler for debugging, for example oom
#       --ccache                use ccache
#       --verbose               show each command
#   -h, --help                  these lines
# Then: ./out/CANN-custom_ops-*.run, and op_api/lib of opp/vendors/customize on LD_LIBRARY_PATH.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
all_ops=(gather_selection_kv_cache gather_miss_rows)
socs=(ascend910b ascend910_93)

die() {
  printf 'build.sh: %s\n' "$*" >&2
  exit 1
}

among() {
  local wanted=$1 each
  shift
  for each in "$@"; do [[ "$each" == "$wanted" ]] && return 0; done
  return 1
}

ops=() soc='' cann=${ASCEND_HOME_PATH:-} part='' more='' debug='' ccache='' verbose=''
while (($#)); do
  case $1 in
    -h | --help)
      sed -n '3,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --ccache) ccache=1 ;;
    --verbose) verbose=1 ;;
    -n | --op-name | -c | --compute-unit | -p | --package-path | -b | --build | --ops-compile-options | --op_debug_config)
      (($# > 1)) || die "$1: expected a value behind it"
      case $1 in
        -n | --op-name) IFS=';' read -r -a ops <<<"$2" ;;
        -c | --compute-unit) soc=$2 ;;
        -p | --package-path) cann=$2 ;;
        -b | --build) part=$2 ;;
        --ops-compile-options) more=$2 ;;
        --op_debug_config) debug=$2 ;;
      esac
      shift
      ;;
    *) die "unknown option $1: build.sh --help lists them" ;;
  esac
  shift
done

((${#ops[@]})) || ops=("${all_ops[@]}")
for op in "${ops[@]}"; do
  among "$op" "${all_ops[@]}" || die "unknown operator '$op': expected one of ${all_ops[*]}"
done
[[ -n "$soc" ]] || die "no SoC: say -c ascend910b (A2) or -c ascend910_93 (A3)"
among "$soc" "${socs[@]}" || die "unknown SoC '$soc': expected one of ${socs[*]}"
[[ -n "$cann" ]] || die "no CANN: say -p PATH, or source CANN's set_env.sh, which sets ASCEND_HOME_PATH"
[[ -d "$cann" ]] || die "no CANN in $cann: there is no such folder"
[[ -x "$cann/tools/opbuild/op_build" ]] || die "no CANN in $cann: tools/opbuild/op_build is missing; is it a toolkit?"
command -v cmake >/dev/null || die "cmake is not on PATH: install version 3.17 or newer"
command -v bisheng >/dev/null || die "bisheng, the compiler of CANN, is not on PATH: source the set_env.sh beside $cann"

export ASCEND_HOME_PATH=$cann # CANN's CMake files look for one another there
build=$here/build/$soc
rm -rf "$build"
arguments=(
  -S "$here" -B "$build" -G "Unix Makefiles" -DCMAKE_BUILD_TYPE=Release
  "-DASCEND_CANN_PACKAGE_PATH=$cann" "-DASCEND_COMPUTE_UNIT=$soc"
  "-DTIDAL_OPS=$(IFS=';' && echo "${ops[*]}")"
  "-DTIDAL_COMPILE_OPTIONS=${more}${debug:+${more:+;}--op_debug_config=$debug}"
)
[[ -z "$ccache" ]] || arguments+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
cmake "${arguments[@]}" || die "CMake could not be configured for $soc with CANN in $cann"

case $part in
  '') targets=(binary package) ;;
  host) targets=(cust_opapi cust_optiling cust_opproto) ;;
  kernel) targets=(binary) ;;
  *) targets=("$part") ;;
esac
for target in "${targets[@]}"; do
  cmake --build "$build" --target "$target" ${verbose:+--verbose} -j "$(nproc)" || die "target $target of $soc failed"
done
[[ -z "$part" ]] || exit 0

shopt -s nullglob
made=("$build"/package/*.run "$build"/*.run)
((${#made[@]})) || die "CMake made no .run package in $build/package"
mkdir -p "$here/out"
result=$here/out/CANN-custom_ops-$soc-linux.$(uname -m).run
cp "${made[0]}" "$result"
chmod +x "$result"
printf 'built %s for %s: %s\n' "${ops[*]}" "$soc" "${result#"$PWD"/}"
