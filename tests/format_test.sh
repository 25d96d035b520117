#!/usr/bin/env bash
# Tests that clang-format 14 leaves all sources as they are, that no line of the files that it does
# not read is wider than 100 columns (rows of tables, links and generated pages may be wider), and
# that texts are in plain American English. Without clang-format 14 it ends with 77 (ctest:
# skipped).
#   tests/format_test.sh [FOLDER]   FOLDER: with clang-format's wheel, as bootstrap.sh installs it
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
folders=(attention cluster configs data launcher models runtime tests)
wide=$(find "${folders[@]}" cmake docs ./*.md CMakeLists.txt -type f \
    \( -name '*.proto' -o -name '*.md' -o -name '*.py' -o -name '*.cmake' -o -name CMakeLists.txt \) \
    -print0 | LC_ALL=C.UTF-8 xargs -0 grep -nE '^.{101,}' |
  grep -vE '://|^[^:]*\.md:[0-9]+:(\||.*\]\()' || true)
[ -z "$wide" ] || { printf 'wider than 100 columns: %s\n' "$wide" >&2; exit 1; }

# Phrases that readers stumble over ("so many" says less than "N", "up to N" or "how many"), and
# British spelling, which would mix with the American one. Whole words, in any case. CONTRIBUTING.md
# lists them.
phrases='so (many|often|long|much)|for ever|go(es)? on with|anew|beside|unsaid|whoever|learnt'
phrases+='|[a-z]*(factor|initial|normal|optim|recogn|summar|synchron|vector)is(e[ds]?|ing|ation)'
phrases+='|behaviours?'
phrased=$(find "${folders[@]}" cmake docs ./*.md CMakeLists.txt -type f \
    \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.proto' \
    -o -name '*.txtpb' -o -name '*.md' -o -name '*.py' -o -name '*.cmake' \
    -o -name CMakeLists.txt \) -print0 |
  LC_ALL=C.UTF-8 xargs -0 grep -nwiE "$phrases" | grep -v '^./CONTRIBUTING.md:' || true)
[ -z "$phrased" ] || { printf 'not plain American English: %s\n' "$phrased" >&2; exit 1; }
# A header's first sentence says what the header provides: a noun or a sentence with its subject.
headless=$(find "${folders[@]}" \( -name '*.h' -o -name '*.cuh' \) -print0 |
  xargs -0 grep -nE '^// (What|Which|How|Where|When|Why|Whether|Those) ' |
  grep -E '^[^:]*:1:' || true)
[ -z "$headless" ] || { printf 'header without a subject: %s\n' "$headless" >&2; exit 1; }

program=""
for candidate in ${1:+"$1/clang_format/data/bin/clang-format"} clang-format-14 clang-format; do
  [[ $("$candidate" --version 2>/dev/null) != *"version 14."* ]] || { program=$candidate; break; }
done
[ -n "$program" ] || { echo "SKIPPED: no clang-format 14"; exit 77; }
mapfile -t files < <(find "${folders[@]}" -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
"$program" --dry-run --Werror "${files[@]}"
echo "format_test: $program leaves ${#files[@]} files as they are"
