#!/usr/bin/env bash
# Two types of one name in one namespace break C++'s one-definition rule where a program links both, and nothing else tells: the
# linker keeps one copy of functions that templates make of them, such as the growth of a std::vector.
set -euo pipefail
cd "$(dirname "$0")/.."

# Prints "namespace::type file" for each type outside anonymous namespaces.
types() {
  awk '
    FNR == 1 { space = ""; anonymous = 0 }
    /^namespace [a-z:_]+ \{/ { space = $2 }
    /^namespace \{/ { anonymous = 1 }
    /^\}  \/\/ namespace$/ { anonymous = 0 }
    !anonymous && /^(struct|class|enum class|union) / && !/;$/ {
      name = $2 == "class" ? $3 : $2
      if (name ~ /::/) next  # nested
      sub(/[:{].*/, "", name)
      if (name ~ /^[A-Za-z0-9_]+$/) print space "::" name, FILENAME
    }' "$@"
}

twice() { types "$@" | sort -u | awk '{ files[$1] = files[$1] " " $2; count[$1]++ } END { for (t in count) if (count[t] > 1) print t ":" files[t] }'; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
printf 'namespace a {\nstruct Same {\n  int x;\n};\nstruct Later;\nnamespace {\nclass Hidden {};\n}  // namespace\n}  // namespace a\n' > "$scratch/one.h"
printf 'namespace a {\nclass Same final : public X {\n};\nstruct Later {};\nnamespace {\nclass Hidden {};\n}  // namespace\n}  // namespace a\n' > "$scratch/two.h"
[[ $(twice "$scratch"/*.h) == "a::Same: $scratch/one.h $scratch/two.h" ]] || { echo "the search itself is broken: $(twice "$scratch"/*.h)"; exit 1; }

found=$(find attention cluster configs data launcher models runtime -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' | xargs bash -c "$(declare -f types twice); twice \"\$@\"" _)
if [[ -n $found ]]; then
  echo "types with two definitions; rename one:"
  echo "$found"
  exit 1
fi
