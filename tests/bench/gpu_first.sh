#!/usr/bin/env bash
# The first measurements on a GPU, in order of importance, each line under its own limit, so that a
# visit of a few minutes leaves a report whenever it ends.
#   tests/bench/gpu_first.sh --report FILE.md [--seconds N] [--lab FOLDER] [--baseline FOLDER]
#     [--package FOLDER] [--only TEXT]
# --seconds: the limit for all lines together (default 480). --lab: programs of tests/bench/kernel_lab
# that are built already; else they are built here, with nvcc. --baseline: the same programs of
# another commit, run in the same visit. --package: a package or build of the preset cuda
# (docs/install.md); without it the lines that need one are named as left out. --only: the lines
# whose names contain TEXT. The report is written again after each line; a short table ends it.
# docs/benchmarks/gpu.md lists the expected result of each line; the lab prints its own prediction
# next to each result. Exit code 1 if a line failed.
set -uo pipefail

stop() { printf 'gpu_first: %s\n' "$*" >&2; exit 2; }
report="" seconds=480 lab="" baseline="" package="" only=""
while [ $# -gt 0 ]; do
  [ $# -gt 1 ] || stop "$1 needs a value"
  case $1 in
    --report) report=$(realpath -m "$2") ;;
    --seconds) [[ $2 =~ ^[1-9][0-9]{0,4}$ ]] || stop "--seconds needs a number"; seconds=$2 ;;
    --lab) lab=$(realpath -m "$2") ;;
    --baseline) baseline=$(realpath -m "$2") ;;
    --package) package=$(realpath -m "$2") ;;
    --only) only=$2 ;;
    *) sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; stop "unknown argument '$1'" ;;
  esac
  shift 2
done
[ -n "$report" ] || stop "--report FILE.md is missing"
cd "$(dirname "$0")/../.." || exit
card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sed -n 1p)
[ -n "$card" ] || stop "no GPU here (nvidia-smi names none)"

work=$(mktemp -d)
trap 'kill $sampler 2>/dev/null; rm -rf "$work"' EXIT
started=$SECONDS table="" pages="" failed=0
left() { echo $((started + seconds - SECONDS)); }

write_report() {
  {
    printf '# First measurements on a GPU\n\n%s, commit %s\n\n' "$card" "$(git describe --always --dirty 2>/dev/null || echo unknown)"
    printf '| line | result | seconds |\n|---|---|---:|\n%s\n%s' "$table" "$pages"
  } >"$report.part" && mv "$report.part" "$report"
}

# line NAME SECONDS COMMAND...: runs a command under its limit; its output becomes a page.
line() {
  local name=$1 limit=$2 begin=$SECONDS result='done' status=0
  shift 2
  [[ $name == *"$only"* ]] || return 0
  limit=$(($(left) < limit ? $(left) : limit))
  if [ $limit -lt 5 ]; then
    result="left out: no time"
  else
    timeout --kill-after=5 "$limit" "$@" >"$work/output" 2>&1 || status=$?
    [ $status -eq 0 ] || { failed=1; result="FAILED: exit code $status"; [ $status -ne 124 ] || result="ended after $limit s"; }
    pages+=$'\n'"## $name"$'\n\n'"$(cat "$work/output")"$'\n'
  fi
  table+="| $name | $result | $((SECONDS - begin)) |"$'\n'
  printf '%-40s %s, %d s\n' "$name" "$result" $((SECONDS - begin))
  write_report
}
leave_out() { # NAME WHY
  [[ $1 != *"$only"* ]] || table+="| $1 | left out: $2 | 0 |"$'\n'
}

line "card" 10 nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu --format=csv
nvidia-smi --query-gpu=clocks.sm,power.draw,clocks_throttle_reasons.active --format=csv,noheader,nounits -lms 200 >"$work/clocks" 2>/dev/null &
sampler=$!
if [ -z "$lab" ]; then
  lab=$work/lab
  line "build the lab" 240 make -s -j"$(nproc)" -C tests/bench/kernel_lab OUT="$lab"
fi
if python3 -c 'import torch' 2>/dev/null; then
  line "ceilings" 60 python3 tests/bench/gpu_ceilings.py
else
  leave_out "ceilings" "no PyTorch for python3"
fi
for folder in ${baseline:+"$baseline"} "$lab"; do
  for program in "$folder"/*; do
    [ -f "$program" ] && [ -x "$program" ] || continue
    line "lab: $(basename "$program")$([ "$folder" = "$lab" ] || echo ', baseline')" 90 "$program"
  done
done
if [ -n "$package" ]; then
  birkhoff=$package/bin/birkhoff
  [ -x "$birkhoff" ] || birkhoff=$package/birkhoff
  for causal in "" --encoder; do
    line "attention against dense${causal:+, encoder}" 100 "$birkhoff" bench attention 'block_local { block: 64 }' \
      'block_local { block: 128 }' 'sinkhorn { block: 64 }' --device cuda --dtype bf16 --heads 16 \
      --lengths 512,1024,4096 --rounds 5 --recorded $causal
  done
  line "attention against dense, 16,384" 60 "$birkhoff" bench attention 'sinkhorn { block: 64 }' \
    --device cuda --dtype bf16 --heads 16 --lengths 16384 --rounds 3 --recorded
  line "doubly stochastic attention" 60 "$birkhoff" bench attention \
    'sinkformer { half_steps: 3 }' --device cuda --dtype bf16 --heads 16 --lengths 1024,4096 \
    --rounds 3 --encoder --recorded
  for model in sinkhorn dense; do
    line "step, $model" 60 "$birkhoff" bench step "configs/lmx_base_$model.txtpb" \
      --vocabulary 32000 --set device=cuda --set train.cuda_graph=true --steps 10
  done
  suite=("$package/bin/gpu_suite")  # finds LibTorch for the package's tests
  [ -x "${suite[0]}" ] || suite=(tests/gpu_suite.sh --build "$package")
  line "tests" 180 "${suite[@]}" --part tests --report "$work/suite.md"
else
  for name in "attention against dense" "step" "tests"; do leave_out "$name" "no --package"; done
fi
kill $sampler 2>/dev/null
pages+=$'\n'"## clocks"$'\n\n'"$(awk -F', *' 'NF == 3 { n++; if ($1 > most) most = $1; if (least == "" || $1 < least) least = $1; power = $2 > power ? $2 : power; reasons[$3]++ }
  END { printf "SM clock %s to %s MHz, power up to %s W over %d samples; throttle reasons:", least, most, power, n; for (r in reasons) printf " %s (%d)", r, reasons[r]; print "" }' "$work/clocks")"$'\n'
write_report
cat "$report"
exit $failed
