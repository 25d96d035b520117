#!/usr/bin/env bash
# All tests that need a GPU, the same kernels on small shapes under compute-sanitizer, and `birkhoff bench`. Builds nothing.
#   tests/gpu_suite.sh [--build FOLDER] [--report FILE.md]
# FOLDER: a build of the preset cuda (default build/cuda), or a package of one, whose bin/gpu_suite gives it. FILE.md: one table
# with GPU, driver, versions and commands, then those of the benchmarks (default FOLDER/gpu_suite.md). compute-sanitizer: from
# CUDA_HOME, the wheels beside LibTorch, /usr/local/cuda or PATH. Under 9 minutes: what is not through by then is ended and
# counts as failed. Exit code 0 if everything passed.
set -uo pipefail
cd "$(dirname "$0")/.."

stop() { printf 'gpu_suite: %s\n' "$*" >&2; exit 1; }
build=build/cuda report=""
while [ $# -gt 0 ]; do
  case $1 in
    --build) [ $# -gt 1 ] || stop "--build needs a folder"; build=$2; shift ;;
    --report) [ $# -gt 1 ] || stop "--report needs a file"; report=$2; shift ;;
    *) sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; stop "unknown argument '$1'" ;;
  esac
  shift
done
report=${report:-$build/gpu_suite.md}

command -v nvidia-smi >/dev/null && gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | sed -n 1p) &&
  [ -n "$gpu" ] || stop "no GPU here (nvidia-smi names none): nothing was tested"
mapfile -t programs < <(find "$build/tests" -name '*_gpu_test' -type f -perm -u+x 2>/dev/null | sort)
[ ${#programs[@]} -gt 0 ] || stop "no *_gpu_test under $build/tests: build with ./bootstrap.sh build --cuda"

# A build folder knows LibTorch by CMake's cache; in a package, bin/gpu_suite has found it.
torch=$(sed -n 's|^BIRKHOFF_TORCH:PATH=||p' "$build/CMakeCache.txt" 2>/dev/null)
torch=${torch:-${BIRKHOFF_TORCH:-}}
sanitizer=""
for folder in "${CUDA_HOME:-}" "$torch/../nvidia/cu13" /usr/local/cuda; do
  [ -n "$folder" ] && [ -x "$folder/bin/compute-sanitizer" ] && sanitizer=$folder/bin/compute-sanitizer && break
done
sanitizer=${sanitizer:-$(command -v compute-sanitizer)} || true

log=$(mktemp) && trap 'rm -f "$log"' EXIT
export GTEST_COLOR=no OMP_NUM_THREADS=4 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
rows="" failed=0 started=$SECONDS

# check SECONDS COMMAND...: a row of the table.
check() {
  local limit=$1 left=$((started + 520 - SECONDS)) result begin=$SECONDS shown tests
  shift
  [ $limit -le $left ] || limit=$((left > 1 ? left : 1))
  shown=$*
  [ -z "$sanitizer" ] || shown=${shown//$sanitizer/compute-sanitizer}
  timeout --kill-after=5 "$limit" "$@" >"$log" 2>&1
  local status=$?
  tests=$(sed -n 's/^\[==========\] \([0-9]*\) tests\{0,1\} from .* ran.*/\1/p' "$log" | tail -n 1)
  if [ $status -eq 0 ] && [ "${tests:-0}" -gt 0 ]; then
    result=passed
  else
    result="FAILED ($([ $status -eq 124 ] && echo "ended after $limit s" || echo "exit code $status"))"
    failed=$((failed + 1))
    printf '\n---- %s\n' "$shown" >&2
    tail -n 60 "$log" >&2
  fi
  printf '%-60s %s, %d s\n' "$shown" "$result" $((SECONDS - begin))
  rows+="| \`$shown\` | ${tests:-0} | $result | $((SECONDS - begin)) |"$'\n'
}

# suites PROGRAM PATTERN: the suites that have tests whose name begins so.
suites() {
  "$1" --gtest_list_tests --gtest_filter="*.$2*" | sed -n 's/^\([^ ]*\)\.\( .*\)\{0,1\}$/\1/p'
}
# A process for each suite: a kernel that breaks the device's context must not take other suites along.
for program in "${programs[@]}"; do
  if [[ $program == *nccl* ]]; then
    for ranks in 1 2; do
      check 180 env BIRKHOFF_TEST_RANKS=$ranks mpiexec --oversubscribe --bind-to none -n $ranks "$program"
    done
  else
    for suite in $(suites "$program" ''); do check 240 "$program" --gtest_filter="$suite.*"; done
  fi
done
if [ -n "$sanitizer" ]; then
  for program in "${programs[@]}"; do
    [[ $program == *nccl* ]] && continue
    for suite in $(suites "$program" Small); do
      for tool in memcheck racecheck synccheck initcheck; do
        check 90 "$sanitizer" --tool "$tool" --error-exitcode 9 "$program" --gtest_filter="$suite.Small*"
      done
    done
  done
else
  rows+="| compute-sanitizer | 0 | NOT FOUND: \`nvidia-cuda-sanitizer-api\` of cmake/cuda_toolkit.txt holds it | 0 |"$'\n'
  failed=$((failed + 1))
fi

# bench ARGUMENTS...: the table that it prints, behind the table of tests.
birkhoff=$build/birkhoff measured=""
[ -x "$birkhoff" ] || birkhoff=$build/bin/birkhoff
bench() {
  local left=$((started + 520 - SECONDS)) begin=$SECONDS result=passed
  if timeout --kill-after=5 $((left < 1 ? 1 : left < 80 ? left : 80)) "$birkhoff" bench "$@" >"$log" 2>&1; then
    measured+=$'\n'"## \`birkhoff bench $*\`"$'\n\n'"$(cat "$log")"$'\n'
  else
    result="FAILED (exit code $?)"
    failed=$((failed + 1))
    tail -n 20 "$log" >&2
  fi
  printf '%-60s %s, %d s\n' "birkhoff bench $*" "$result" $((SECONDS - begin))
  rows+="| \`birkhoff bench $*\` | | $result | $((SECONDS - begin)) |"$'\n'
}
for precision in fp32 bf16 fp16; do
  bench step configs/baby_gpt_dense.txtpb --set device=cuda --set train.precision=$precision
done
bench attention --device cuda --dtype bf16 --heads 16 --lengths 1024,4096
# On one GPU the ranks share it: function, and no speed to be proud of.
[ "$(nvidia-smi --list-gpus | wc -l)" -gt 1 ] || export BIRKHOFF_SHARE_GPUS=1
bench comm --ranks 2 --device cuda --bytes 4K-64M
bench loader

# What was built from which commit: a package says it in a file, a build folder is asked.
versions() {
  cat "$build/versions" 2>/dev/null && return
  echo "commit $(git describe --always --dirty 2>/dev/null || echo unknown)"
  "$build/birkhoff" --version 2>/dev/null
}
{
  printf '# Tests on a GPU\n\n| | |\n|---|---|\n'
  printf '| GPU, driver | %s |\n' "$gpu"
  versions | sed -nE 's/^(commit|compiler|LibTorch|CUDA|MPI) (.*)/| \1 | \2 |/p'
  printf '| command | `tests/gpu_suite.sh --build %s`, %d s |\n\n' "$build" $((SECONDS - started))
  printf '| program | tests | result | seconds |\n|---|---|---|---|\n%s%s' "$rows" "$measured"
} >"$report"
printf '\n%s\n' "$report"
[ $failed -eq 0 ] || stop "$failed of the rows failed"
