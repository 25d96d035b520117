#!/usr/bin/env bash
# Makes a package of a finished build (cmake/package.sh), moves it, and runs it in an empty
# environment: version, a corpus, training on two ranks, evaluation. Fails if a command fails, or if a
# process loads a library that a bare machine lacks.
#   tests/package_test.sh [BUILD]     BUILD: default build/cpu
set -euo pipefail
cd "$(dirname "$0")/.."

stop() { printf 'package_test: %s\n' "$*" >&2; exit 1; }
build=${1:-build/cpu}
torch=$(sed -n 's/^BIRKHOFF_TORCH:PATH=//p' "$build/CMakeCache.txt")
place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT
cmake/package.sh "$build" "$place/made"
package="$place/another place"  # a space, because people have them
mv "$place"/made/birkhoff-* "$package"
mkdir "$place/libraries"
cd "$place"

# LD_DEBUG makes the dynamic loader write what each process loads, plugins included.
clean() {
  env -i PATH=/usr/bin:/bin HOME="$place" BIRKHOFF_TORCH="$torch" LD_DEBUG=libs LD_DEBUG_OUTPUT="$place/libraries/of" "$@" ||
    stop "exit code $? of: $*"
}
birkhoff="$package/bin/birkhoff"
clean "$birkhoff" --version
grep -q '^bin/birkhoff train' "$package/README.md" || stop "README.md does not say how to train"
cp "$package"/share/openmpi/*.txt .
clean "$birkhoff" prepare --out corpus --tokenizer bytes --valid 0.2 ./*.txt
clean "$birkhoff" train "$package/configs/quickstart.txtpb" --run run --ranks 2 --set data.corpus=corpus --set train.steps=4
grep -q '2 ranks' run/log/rank-0.log || stop "run/log/rank-0.log does not mention 2 ranks"
clean "$birkhoff" eval run

# Of programs of the package (bash, which starts them, is none): what is neither in it nor LibTorch's, CUDA's, glibc's or gcc's.
loaded=$(awk -v package="$package/" '
  FNR == 1 { ours = 0; start = "" }
  /calling init: / { sub(/.*calling init: /, ""); if (ours) print; else start = start $0 "\n" }
  /initialize program: / { ours = index($0, package); if (ours) printf "%s", start; start = "" }' libraries/* | sort -u)
foreign=$(grep -vF -e "$package/" -e "$(dirname "$torch")/" <<<"$loaded" |
  grep -vE '/(ld-linux-.*|lib((c|m|dl|rt|util|pthread|resolv|nss_[a-z]*|stdc\+\+|gcc_s)|(cu(blas|d|f|pti|rand|s)|nccl|nv).*))\.so' || true)
[ -z "$foreign" ] || stop "libraries from outside the package: $(tr '\n' ' ' <<<"$foreign")"
grep -q /lib/openmpi/ <<<"$loaded" || stop "no plugin of Open MPI was loaded"

status=0
said=$(env -i PATH=/usr/bin:/bin BIRKHOFF_TORCH="$place" "$birkhoff" --version 2>&1) || status=$?
[ $status -eq 2 ] && [ "$(wc -l <<<"$said")" = 1 ] || stop "without LibTorch: exit code $status and: $said"
echo "package_test: passed"
