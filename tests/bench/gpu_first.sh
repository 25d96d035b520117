#!/usr/bin/env bash
# The first measurements on a GPU, in order of importance, each line under its own limit, so that a
# visit of a few minutes leaves a report whenever it ends.
#   tests/bench/gpu_first.sh --report FILE.md [--seconds N] [--package FOLDER] [--lab FOLDER]
#     [--baseline FOLDER]... [--only REGEX]
# --seconds: the limit for all lines together (default 520). --package: a package or build of the
# preset cuda (docs/install.md); without it the lines that need one are named as left out. --lab:
# programs of tests/bench/kernel_lab that are built already; else they are built here, with nvcc.
# --baseline: a package or build of an earlier commit, or its programs of the lab; twice for both.
# Each of its lines runs right before ours, and the table of figures compares the two. --only: the
# lines whose names match. The report is written again after each line. Next to each figure it says
# what gpu_expected.csv or the lab expects. Exit code 1 if a line failed, except of the baseline.
set -uo pipefail

stop() { printf 'gpu_first: %s\n' "$*" >&2; exit 2; }
# program_of FOLDER: the program of a package or build; empty if it is neither.
program_of() {
  local each
  for each in "$1/bin/birkhoff" "$1/birkhoff"; do [ ! -f "$each" ] || { echo "$each"; return; }; done
}
report="" seconds=520 package="" birkhoff="" lab="" baseline="" birkhoff_before="" lab_before="" only=""
while [ $# -gt 0 ]; do
  [ $# -gt 1 ] || stop "$1 needs a value"
  case $1 in
    --report) report=$(realpath -m "$2") ;;
    --seconds) [[ $2 =~ ^[1-9][0-9]{0,4}$ ]] || stop "--seconds needs a number"; seconds=$2 ;;
    --package)
      package=$(realpath -m "$2") birkhoff=$(program_of "$(realpath -m "$2")")
      [ -n "$birkhoff" ] || stop "--package $2: no program birkhoff there"
      ;;
    --lab) lab=$(realpath -m "$2") ;;
    --baseline)
      program=$(program_of "$(realpath -m "$2")")
      if [ -n "$program" ]; then
        baseline=$(realpath -m "$2") birkhoff_before=$program
      else
        lab_before=$(realpath -m "$2")
        [ -d "$lab_before" ] || stop "--baseline $2: no such folder"
      fi
      ;;
    --only)
      only=$2
      [[ "" =~ $only ]]
      [ $? -ne 2 ] || stop "--only $2: not a regular expression"
      ;;
    *) sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; stop "unknown argument '$1'" ;;
  esac
  shift 2
done
[ -n "$report" ] || stop "--report FILE.md is missing"
cd "$(dirname "$0")/../.." || exit
card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sed -n 1p)
[ -n "$card" ] || stop "no GPU here (nvidia-smi names none)"

work=$(mktemp -d)
trap 'kill $sampler 2>/dev/null; rm -rf "$work"' EXIT
started=$SECONDS sampler="" table="" figures="" pages="" failed=0
title="$card, commit $(git describe --always --dirty 2>/dev/null || echo unknown)"
title+=$(sed -n 's/^commit /, package of /p' "$package/versions" 2>/dev/null)
title+=$(sed -n 's/^commit /, baseline of /p' "$baseline/versions" 2>/dev/null)
left() { echo $((started + seconds - SECONDS)); }

write_report() {
  {
    printf '# First measurements on a GPU\n\n%s\n\n' "$title"
    printf '| GPU | line | result | seconds |\n|---|---|---|---:|\n%s\n' "$table"
    printf '## Figures\n\nus: forward and backward of attention, a step, or a launch. x before, x dense: times as fast as the commit before, as dense attention. Share: of the floor; of lab programs, of the copy speed.\n\n'
    printf '| GPU | figure | us | us before | x before | dense x before | x dense | share | expected |\n'
    printf '|---|---|---:|---:|---:|---:|---:|---:|---|\n%s%s' "$figures" "$pages"
  } >"$report.part" && mv "$report.part" "$report"
}

# line NAME SECONDS COMMAND...: runs a command under its limit; its output becomes a page.
line() {
  local name=$1 limit=$2 begin=$SECONDS result='done' status=0
  shift 2
  : >"$work/output"
  [[ $name =~ $only ]] || return 0
  limit=$(($(left) < limit ? $(left) : limit))
  if [ $limit -lt 5 ]; then
    result="left out: no time"
  else
    timeout --kill-after=5 "$limit" "$@" >"$work/output" 2>&1 || status=$?
    [ $status -eq 0 ] || { failed=1; result="FAILED: exit code $status"; [ $status -ne 124 ] || result="ended after $limit s"; }
    pages+=$'\n'"## $name"$'\n\n'"$(cat "$work/output")"$'\n'
  fi
  table+="| $card | $name | $result | $((SECONDS - begin)) |"$'\n'
  printf '%-60s %s, %d s\n' "$name" "$result" $((SECONDS - begin))
  write_report
}

# compare NAME SECONDS BEFORE NOW ARGUMENT...: a line of the program NOW, after one of the program
# BEFORE if there is one; then the figures of both.
compare() {
  local name=$1 limit=$2 before=$3 now=$4 was=$failed rows
  shift 4
  : >"$work/before"
  if [ -x "$before" ]; then
    line "$name, before" "$limit" "$before" "$@"
    failed=$was  # an earlier commit may lack what is measured
    mv "$work/output" "$work/before"
  fi
  line "$name" "$limit" "$now" "$@"
  rows=$(python3 tests/bench/gpu_rows.py "$card" "$work/output" "$work/before") || failed=1
  figures+=$rows${rows:+$'\n'}
  write_report
}
attention() { # NAME SECONDS ARGUMENT...
  compare "$1" "$2" "$birkhoff_before" "$birkhoff" bench attention "${@:3}" --device cuda --dtype bf16 \
    --heads 16 --rounds 5 --recorded
}
routing() { # LENGTH SECONDS
  local sizes="clusters: $(($1 / 256)) window: 256"
  attention "routing, L $1" "$2" "routing { $sizes }" "routing { $sizes causal_selection: full_topw }" --lengths "$1"
}
# in_suite NAME SECONDS ARGUMENT...: a line of gpu_suite, which ends its own programs; a signal would
# end only the suite. A package's finds LibTorch.
in_suite() {
  local suite=("$package/bin/gpu_suite") limit=$(($(left) - 10 < $2 ? $(left) - 10 : $2))
  [ -x "${suite[0]}" ] || suite=(tests/gpu_suite.sh --build "$package")
  if [ $limit -lt 10 ]; then leave_out "$1" "no time"; return; fi
  line "$1" $((limit + 10)) "${suite[@]}" --seconds $limit --report "$work/suite.md" "${@:3}"
}
leave_out() { # NAME WHY
  [[ ! $1 =~ $only ]] || table+="| $card | $1 | left out: $2 | 0 |"$'\n'
}

line "card" 10 nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu --format=csv
nvidia-smi --query-gpu=clocks.sm,power.draw,clocks_throttle_reasons.active --format=csv,noheader,nounits -lms 200 >"$work/clocks" 2>/dev/null &
sampler=$!
if [ -z "$lab" ]; then
  lab=$work/lab
  line "build the lab" 240 make -s -j"$(nproc)" -C tests/bench/kernel_lab OUT="$lab"
fi
if [ -n "$birkhoff" ]; then
  steps=(--vocabulary 32000 --set device=cuda --set train.cuda_graph=true)
  for causal in --encoder ""; do
    attention "Sinkhorn and blocks of 128${causal:+, encoder}" 60 'sinkhorn { block: 64 }' 'block_local { block: 128 }' \
      --lengths 128,512,4096 $causal
  done
  for model in dense sinkhorn; do
    compare "step, $model" 60 "$birkhoff_before" "$birkhoff" bench step "configs/lmx_base_$model.txtpb" "${steps[@]}" --steps 10
  done
  attention "MoBA" 60 moba --lengths 1024,4096
  routing 4096 60
  routing 1024 60
  attention "Sinkhorn, L 16384" 100 'sinkhorn { block: 64 }' --lengths 16384
  attention "MoBA, L 16384" 80 moba --lengths 16384
  routing 16384 80
  for model in dense sinkhorn; do
    if [ -f "$lab/libkernel_trace.so" ]; then
      line "trace of the step, $model" 60 env CUDA_INJECTION64_PATH="$lab/libkernel_trace.so" \
        "$birkhoff" bench step "configs/lmx_base_$model.txtpb" "${steps[@]}" --steps 3
    else
      leave_out "trace of the step, $model" "no libkernel_trace.so in the lab: it needs CUPTI, and the lab must be built"
    fi
  done
  attention "cumulative balance" 60 'sinkhorn { block: 64 causal_balance: cumulative }' --lengths 4096,16384
  for config in sort_paper multi30k_dense; do
    compare "step with padding, $config" 40 "$birkhoff_before" "$birkhoff" bench step "configs/$config.txtpb" \
      --set device=cuda --set train.precision=bf16
  done
else
  for name in "attention" "steps" "traces of the steps"; do leave_out "$name" "no --package"; done
fi
for program in "$lab"/*; do
  [[ -f $program && -x $program && $program != *.so ]] || continue
  compare "lab: ${program##*/}" 90 "${lab_before:+$lab_before/${program##*/}}" "$program"
done
library=""
for file in "$package/lib/libbirkhoff_ops.so" "$package/libbirkhoff_ops.so"; do [ ! -f "$file" ] || library=$file; done
without=""  # why nothing of PyTorch is run
if python3 -c 'import torch' 2>/dev/null; then
  line "ceilings" 60 python3 tests/bench/gpu_ceilings.py
  [ -n "$library" ] || without="no --package with libbirkhoff_ops.so"
else
  without="python3 cannot import torch"
  leave_out "ceilings" "$without"
fi
if [ -z "$without" ]; then
  compare "operators' cost" 60 "" python3 tests/bench/operator_cost.py --library "$library" --device cuda --dtype bfloat16
else
  for name in "operators' cost" "operators' tests"; do leave_out "$name" "$without"; done
fi
if [ -n "$birkhoff" ]; then
  attention "doubly stochastic attention" 60 'sinkformer { half_steps: 3 }' --lengths 1024,4096 --encoder
  attention "top-k attention" 60 'dense { normalizer: top_k }' --lengths 1024,4096 --encoder
  in_suite "tests" 180 --part tests
  # One family of kernels a call; Gathered takes longest.
  for family in Clusters BlockTopK RowAttention Sinkformer Activation BlockMix Balance BlockAttention \
    ResidualNorm CrossEntropy BlockPool ChunkSums FusedUpdate Optimizers SortedIndices Philox Reduce \
    RoundedLinear Gathered; do
    in_suite "racecheck: $family" 300 --part racecheck --suites "*$family*"
  done
else
  for name in "tests" "racecheck"; do leave_out "$name" "no --package"; done
fi
[ -n "$without" ] || line "operators' tests" 300 python3 tests/interop/pytorch_operators.py --library "$library" --device cuda
kill $sampler 2>/dev/null
pages+=$'\n'"## clocks"$'\n\n'"$(awk -F', *' 'NF == 3 { n++; if ($1 > most) most = $1; if (least == "" || $1 < least) least = $1; power = $2 > power ? $2 : power; reasons[$3]++ }
  END { printf "SM clock %s to %s MHz, power up to %s W over %d samples; throttle reasons:", least, most, power, n; for (r in reasons) printf " %s (%d)", r, reasons[r]; print "" }' "$work/clocks")"$'\n'
write_report
cat "$report"
exit $failed
