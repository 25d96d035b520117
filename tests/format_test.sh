#!/usr/bin/env bash
# Tests that clang-format 14 leaves all sources as they are. Ends with 77 (ctest: skipped) without it.
#   tests/format_test.sh [FOLDER]   FOLDER: with the wheel of clang-format, as bootstrap.sh installs it
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
program=""
for candidate in ${1:+"$1/clang_format/data/bin/clang-format"} clang-format-14 clang-format; do
  [[ $("$candidate" --version 2>/dev/null) != *"version 14."* ]] || { program=$candidate; break; }
done
[ -n "$program" ] || { echo "SKIPPED: no clang-format 14"; exit 77; }
mapfile -t files < <(find attention cluster configs data launcher models runtime tests \
  -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
"$program" --dry-run --Werror "${files[@]}"
echo "format_test: $program leaves ${#files[@]} files as they are"
