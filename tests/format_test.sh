#!/usr/bin/env bash
# Tests that clang-format 14 leaves all sources as they are, and that no line of the files that it
# does not read is wider than 100 columns; rows of tables, links and generated pages may be wider.
# Without clang-format 14 it ends with 77 (ctest: skipped).
#   tests/format_test.sh [FOLDER]   FOLDER: with clang-format's wheel, as bootstrap.sh installs it
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
folders=(attention cluster configs data launcher models runtime tests)
wide=$(find "${folders[@]}" cmake docs ./*.md CMakeLists.txt -type f \
    \( -name '*.proto' -o -name '*.md' -o -name '*.py' -o -name '*.cmake' -o -name CMakeLists.txt \) \
    -print0 | LC_ALL=C.UTF-8 xargs -0 grep -nE '^.{101,}' |
  grep -vE '://|^[^:]*\.md:[0-9]+:(\||.*\]\()' || true)
[ -z "$wide" ] || { printf 'wider than 100 columns: %s\n' "$wide" >&2; exit 1; }

program=""
for candidate in ${1:+"$1/clang_format/data/bin/clang-format"} clang-format-14 clang-format; do
  [[ $("$candidate" --version 2>/dev/null) != *"version 14."* ]] || { program=$candidate; break; }
done
[ -n "$program" ] || { echo "SKIPPED: no clang-format 14"; exit 77; }
mapfile -t files < <(find "${folders[@]}" -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
"$program" --dry-run --Werror "${files[@]}"
echo "format_test: $program leaves ${#files[@]} files as they are"
