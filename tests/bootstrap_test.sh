#!/usr/bin/env bash
# Tests where bootstrap.sh looks for LibTorch and where it would put it, as root and as other users, in
# temporary folders.
#   tests/bootstrap_test.sh
set -euo pipefail
script=$(dirname "$(readlink -f "$0")")/../bootstrap.sh
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
chmod 755 "$place"
# From the first of these functions to the last.
source <(sed -n '/^skipped_tests() /,/^}/p; /^deps_folder() /,/^}/p; /^others_can_read() /,/^}/p; /^warn_if_root_only() /,/^}/p' "$script")
stop() { echo "stop: $*"; return 1; }
id() { echo "$user"; }

failures=0
expect() { # WHAT EXPECTED GOT
  [ "$2" = "$3" ] || { echo "bootstrap_test: $1: '$3' instead of '$2'" >&2; failures=$((failures + 1)); }
}
fresh() { # USER: nothing is installed
  rm -rf "$place"/*
  user=$1 HOME=$place/home shared=$place/shared name=torch-2.11.0
  unset BIRKHOFF_DEPS
  mkdir -p "$HOME" && chmod 700 "$HOME"
}

fresh 0
expect "root installs for all" "$place/shared" "$(deps_folder $name)"
unset HOME
expect "root without HOME" "$place/shared" "$(deps_folder $name)"
fresh 1000
expect "others install for themselves" "$place/home/.cache/birkhoff" "$(deps_folder $name)"
mkdir -p "$place/shared/$name"
expect "others take what root has installed" "$place/shared" "$(deps_folder $name)"
expect "of its name only" "$place/home/.cache/birkhoff" "$(deps_folder $name-cuda)"
mkdir -p "$HOME/.cache/birkhoff/$name"
expect "one's own comes first" "$place/home/.cache/birkhoff" "$(deps_folder $name)"
BIRKHOFF_DEPS=$place/asked
expect "what was asked for" "$place/asked" "$(deps_folder $name)"
fresh 1000
unset HOME
expect "others without HOME" "stop: HOME is not set: set BIRKHOFF_DEPS to a folder for LibTorch" "$(deps_folder $name || true)"

fresh 0
mkdir -p "$HOME/.cache/birkhoff/$name/torch/lib"
expect "an installation in root's home stays in use" "$place/home/.cache/birkhoff" "$(deps_folder $name)"
torch=$HOME/.cache/birkhoff/$name/torch
said=$(warn_if_root_only 2>&1)
[[ $said == *"$torch, which other users cannot read"*"move $name to $place/shared"* ]] || expect "who reads it" "a line" "$said"
expect "in one line" 1 "$(wc -l <<<"$said")"
chmod 755 "$HOME"
expect "a home that all can read" "" "$(warn_if_root_only 2>&1)"
chmod 700 "$HOME/.cache"
[ -n "$(warn_if_root_only 2>&1)" ] || expect "a folder on the way" "a line" ""
user=1000
expect "others are not told" "" "$(warn_if_root_only 2>&1)"

cat >"$place/tests.xml" <<'END'
	<testcase name="passed" classname="passed" time="0.1" status="run">
		<system-out>[ RUN      ]
a.cpp:3: Skipped
one of its parts
[  SKIPPED ]
</system-out>
	</testcase>
	<testcase name="by_ctest" classname="by_ctest" time="0.1" status="notrun">
		<skipped message="SKIP_RETURN_CODE=77"/>
		<system-out>SKIPPED: import torch: none
</system-out>
	</testcase>
	<testcase name="by_gtest" classname="by_gtest" time="0.1" status="notrun">
		<skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>
		<system-out>[ RUN      ] Script.Shellcheck
/a/b.cpp:368: Skipped
no shellcheck
[  SKIPPED ] Script.Shellcheck (1 ms)
</system-out>
	</testcase>
END
expect "which tests were skipped, and why" $'by_ctest: import torch: none\nby_gtest: no shellcheck' "$(skipped_tests "$place/tests.xml")"

"$script" --help | grep -q '/var/cache/birkhoff' || expect "--help" "the folder" "nothing of it"
"$script" --help | tail -1 | grep -q 'CUDA_HOME' || expect "--help" "its last line" "another"
[ "$failures" = 0 ] || exit 1
echo "bootstrap_test: passed"
