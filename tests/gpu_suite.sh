#!/usr/bin/env bash
# Runs all tests that need a GPU, the same kernels on small shapes under compute-sanitizer, and
# `birkhoff bench`. Builds nothing.
#   tests/gpu_suite.sh [--build FOLDER] [--report FILE.md] [--logs FOLDER] [--seconds N]
#     [--part tests|sanitizer|racecheck|bench] [--suites GLOB]
# FOLDER: a build of the preset cuda (default build/cuda), or a package, whose bin/gpu_suite passes it.
# FILE.md: a table with GPU, driver, versions and commands, then the tables of the benchmarks
# (default FOLDER/gpu_suite.md). --logs: keeps what the programs print, a file each. --part: only that
# part; racecheck runs only that tool, the slowest of the sanitizer's. --suites: only the test suites
# of that name, and none of NCCL. compute-sanitizer is taken from CUDA_HOME, the wheels next to LibTorch,
# /usr/local/cuda or PATH. Tests and sanitizers run in parallel, the benchmarks after them. After N
# seconds (default 520) unfinished programs are ended and count as failed. Exit code 0 if everything
# passed. Figures with their bars, PyTorch and the operators: tests/bench/gpu_figures.py.
set -uo pipefail

stop() { printf 'gpu_suite: %s\n' "$*" >&2; exit 1; }
usage() { sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; stop "$@"; }
build="" report="" logs="" seconds=520 part=all suites="*"
while [ $# -gt 0 ]; do
  case $1 in
    --build) [ $# -gt 1 ] || stop "--build needs a folder"; build=$(realpath -m "$2"); shift ;;
    --report) [ $# -gt 1 ] || stop "--report needs a file"; report=$(realpath -m "$2"); shift ;;
    --logs) [ $# -gt 1 ] || stop "--logs needs a folder"; logs=$(realpath -m "$2"); shift ;;
    --seconds) [[ ${2:-} =~ ^[1-9][0-9]{0,4}$ ]] || stop "--seconds needs a number"; seconds=$2; shift ;;
    --part) [[ ${2:-} =~ ^(tests|sanitizer|racecheck|bench)$ ]] || stop "--part needs tests, sanitizer, racecheck or bench"; part=$2; shift ;;
    --suites) [ $# -gt 1 ] || stop "--suites needs a name of test suites"; suites=$2; shift ;;
    *) usage "unknown argument '$1'" ;;
  esac
  shift
done
cd "$(dirname "$0")/.." || exit
build=${build:-$PWD/build/cuda}
report=${report:-$build/gpu_suite.md}
wants() { [ "$part" = all ] || [ "$part" = "$1" ]; }

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

if [ -n "$logs" ]; then
  mkdir -p "$logs" && work=$logs
else
  work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
fi
most=$(($(nproc) / 2 < 6 ? $(nproc) / 2 : 6))  # programs at a time; nproc obeys OMP_NUM_THREADS
export GTEST_COLOR=no OMP_NUM_THREADS=4 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_btl_vader_single_copy_mechanism=none  # containers forbid it
rows="" failed=0 started=$SECONDS jobs=0
left() { echo $((started + seconds - SECONDS > 1 ? started + seconds - SECONDS : 1)); }

# row COMMAND TESTS RESULT SECONDS: a row of the table; any result but `passed` is a failure.
row() {
  [ "$3" = passed ] || failed=$((failed + 1))
  printf '%-60s %s, %d s\n' "$1" "$3" "$4"
  rows+="| \`$1\` | $2 | $3 | $4 |"$'\n'
}

# check SECONDS COMMAND...: a test program, in parallel with others; rows_of_checks waits and makes the rows, in the order of the calls.
check() {
  local limit=$1 job=$work/$((jobs += 1))
  shift
  while [ "$(jobs -rp | wc -l)" -ge $((most > 1 ? most : 1)) ]; do wait -n; done
  limit=$(($(left) < limit ? $(left) : limit))
  printf '%s' "$*" >"$job.command"
  {
    local begin=$SECONDS status
    timeout --kill-after=5 "$limit" "$@" >"$job.log" 2>&1
    status=$?
    echo $((SECONDS - begin)) $status "$limit" >"$job.end"
  } &
}

rows_of_checks() {
  local job shown took status limit tests result
  wait
  for ((job = 1; job <= jobs; ++job)); do
    shown=$(<"$work/$job.command")
    [ -z "$sanitizer" ] || shown=${shown//$sanitizer/compute-sanitizer}
    read -r took status limit <"$work/$job.end"
    tests=$(sed -n 's/^\[==========\] \([0-9]*\) tests\{0,1\} from .* ran.*/\1/p' "$work/$job.log" | tail -n 1)
    if [ "$status" -eq 0 ] && [ "${tests:-0}" -gt 0 ]; then
      result=passed
    else
      result="FAILED ($([ "$status" -eq 124 ] && echo "ended after $limit s" || echo "exit code $status"))"
      printf '\n---- %s\n' "$shown" >&2
      tail -n 60 "$work/$job.log" >&2
    fi
    row "${shown//$build/BUILD}" "${tests:-0}" "$result" "$took"
  done
}

# suites_of PROGRAM: its test suites.
suites_of() { timeout 120 "$1" --gtest_filter="$suites.*" --gtest_list_tests | sed -n 's/^\([^ ]*\)\.\( .*\)\{0,1\}$/\1/p'; }

for program in "${programs[@]}"; do
  if [[ $program == *nccl* ]]; then
    [ "$suites" = "*" ] || continue
    for ranks in 1 2 4; do
      ! wants tests || check 240 env BIRKHOFF_TEST_RANKS=$ranks mpiexec --oversubscribe --bind-to none -n $ranks "$program"
    done
    continue
  fi
  [ "$suites" = "*" ] || [ -n "$(suites_of "$program")" ] || continue
  # A process for each suite: a kernel that breaks the device's context must not take other suites along.
  if wants tests; then
    mapfile -t names < <(suites_of "$program")
    [ ${#names[@]} -gt 0 ] || row "$program --gtest_list_tests" 0 "FAILED (names no test)" 0
    for suite in "${names[@]}"; do check 300 "$program" --gtest_filter="$suite.*"; done
  fi
  if [ -n "$sanitizer" ]; then
    # Our kernels alone; but what memory holds at all also libraries write, and those that read more than was written
    # (their copies of graphs, look-back scans) are left out.
    for tool in memcheck racecheck synccheck; do
      wants sanitizer || [ "$part" = $tool ] || continue
      check 400 "$sanitizer" --tool "$tool" --report-api-errors no --kernel-name kernel_substring=birkhoff --error-exitcode 9 \
        "$program" --gtest_filter="$suites.Small*"
    done
    ! wants sanitizer || check 400 "$sanitizer" --tool initcheck --report-api-errors no --error-exitcode 9 \
      "$program" --gtest_filter="$suites.Small*-StepGraph*:DeviceFeed*"
  fi
done
rows_of_checks
if { wants sanitizer || wants racecheck; } && [ -z "$sanitizer" ]; then
  row compute-sanitizer 0 "NOT FOUND: \`nvidia-cuda-sanitizer-api\` of cmake/cuda_toolkit.txt holds it" 0
fi

# bench ARGUMENTS...: the table that it prints, behind the table of tests.
birkhoff=$build/birkhoff measured=""
[ -x "$birkhoff" ] || birkhoff=$build/bin/birkhoff
bench() {
  local begin=$SECONDS result=passed
  if timeout --kill-after=5 $(($(left) < 100 ? $(left) : 100)) "$birkhoff" bench "$@" >"$work/bench" 2>&1; then
    measured+=$'\n'"## \`birkhoff bench $*\`"$'\n\n'"$(cat "$work/bench")"$'\n'
  else
    result="FAILED (exit code $?)"
    tail -n 20 "$work/bench" >&2
  fi
  row "birkhoff bench $*" "" "$result" $((SECONDS - begin))
}
if wants bench; then
  for precision in fp32 bf16 fp16; do
    bench step configs/baby_gpt_dense.txtpb --set device=cuda --set train.precision=$precision
  done
  bench attention --device cuda --dtype bf16 --heads 16 --lengths 1024,4096
  # On one GPU the ranks share it, and take turns: function, and no speed to be proud of.
  bytes=4K-64M rounds=11
  [ "$(nvidia-smi --list-gpus | wc -l)" -gt 1 ] || { export BIRKHOFF_SHARE_GPUS=1; bytes=4K-4M rounds=3; }
  bench comm --ranks 2 --device cuda --bytes $bytes --rounds $rounds
  bench loader
fi

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
  printf '| command | `tests/gpu_suite.sh --build BUILD --part %s`, %d s; BUILD: %s |\n\n' "$part" $((SECONDS - started)) "$(basename "$build")"
  printf '| program | tests | result | seconds |\n|---|---|---|---|\n%s%s' "$rows" "$measured"
} >"$report"
printf '\n%s\n' "$report"
[ $failed -eq 0 ] || stop "$failed of the rows failed"
