#!/usr/bin/env bash
# From a fresh Debian 12 to a built, tested or demonstrated Birkhoff. Idempotent: a second run installs and builds nothing.
#   ./bootstrap.sh build   install what is missing (system packages, the pinned LibTorch), configure, compile
#   ./bootstrap.sh test    the same, then run all tests
#   ./bootstrap.sh demo    the same, then corpus -> training on two ranks -> evaluation -> checkpoint -> curve -> sample
# Options:
#   --cuda           for GPUs: the preset cuda; takes a CUDA 13 toolkit from CUDA_HOME or /usr/local/cuda, or installs one
#   --no-install     install nothing: report what is missing and stop
#   --preset NAME    CMake preset (cpu, cpu-asan, cpu-tsan, cuda, cuda-debug); default cpu
#   --jobs N         compile jobs; default: number of cores
#   --target NAME    with build: only this target
# Environment: BIRKHOFF_TORCH (your own LibTorch: the folder with include/ and lib/), BIRKHOFF_DEPS (the folder for the pinned
# LibTorch; default ~/.cache/birkhoff, or /var/cache/birkhoff for root, so that all users can run what root builds), and
# CUDA_HOME (a CUDA 13 toolkit).
set -euo pipefail
cd "$(dirname "$0")"

usage() { sed -n '2,14s/^# \{0,1\}//p' "$0"; }
say() { printf '\n== %s\n' "$*"; }
stop() { printf 'bootstrap: %s\n' "$*" >&2; exit 1; }

goal="" install=1 preset="" cuda="" jobs=$(nproc) target=all
while [ $# -gt 0 ]; do
  case $1 in
    build|test|demo) goal=$1 ;;
    --cuda) cuda=1 ;;
    --no-install) install=0 ;;
    --preset) [ $# -gt 1 ] || stop "--preset needs a name"; preset=$2; shift ;;
    --jobs) [ $# -gt 1 ] || stop "--jobs needs a number"; jobs=$2; shift ;;
    --target) [ $# -gt 1 ] || stop "--target needs a name"; target=$2; shift ;;
    -h|--help) usage; exit 0 ;;
    *) usage >&2; stop "unknown argument '$1'" ;;
  esac
  shift
done
[ -n "$goal" ] || { usage >&2; exit 2; }
[ -n "$preset" ] || { [ -n "$cuda" ] && preset=cuda || preset=cpu; }
[ "$target" = all ] || [ "$goal" = build ] || stop "--target works only with build"
[ "$goal" != demo ] || target=birkhoff  # no tests
case $preset in
  cuda*) cuda=1 ;;
  *) [ -z "$cuda" ] || stop "--cuda and the preset $preset exclude each other" ;;
esac

packages=(g++ cmake ninja-build pkg-config
  libopenmpi-dev openmpi-bin libhdf5-dev libprotobuf-dev protobuf-compiler libsentencepiece-dev
  libfmt-dev libcli11-dev nlohmann-json3-dev libxxhash-dev zlib1g-dev libzstd-dev
  libpng-dev libjpeg-dev libminizip-dev
  libgtest-dev libgmock-dev librapidcheck-dev)
# As root the tests start a Slurm of their own, and shellcheck reads the scripts for it, and they make hosts with networks of their
# own (iproute2); without these they skip that part.
if [ "$goal" = test ] && [ "$install" = 1 ] && [ "$(id -u)" = 0 ]; then
  packages+=(slurm-wlm slurm-wlm-basic-plugins munge shellcheck iproute2)
fi

# The folder for LibTorch: the user's own if LibTorch is already there, else the machine's. Only root can create the latter.
shared=/var/cache/birkhoff
deps_folder() { # NAME of the LibTorch in it
  local own=${HOME:+$HOME/.cache/birkhoff}
  if [ -n "${BIRKHOFF_DEPS:-}" ]; then echo "$BIRKHOFF_DEPS"
  elif [ -n "$own" ] && [ -e "$own/$1" ]; then echo "$own"
  elif [ -r "$shared/$1" ] || [ "$(id -u)" = 0 ]; then echo "$shared"
  elif [ -n "$own" ]; then echo "$own"
  else stop "HOME is not set: set BIRKHOFF_DEPS to a folder for LibTorch"
  fi
}
others_can_read() { # PATH
  local path
  path=$(readlink -m "$1")
  while [ "$path" != / ]; do
    [[ $(stat -c %A "$path") == *[xt] ]] || return 1
    path=$(dirname "$path")
  done
}

# LibTorch for GPUs has its own folder, so that a build without CUDA stays as it is.
name=torch-2.11.0${cuda:+-cuda}
deps=$(deps_folder "$name")
pinned=$deps/$name
torch=${BIRKHOFF_TORCH:-$pinned/torch}
[ -n "$cuda" ] && library=libtorch_cuda || library=libtorch_cpu
have_torch() { [ -e "$torch/include/ATen/core/Tensor.h" ] && [ -e "$torch/lib/$library.so" ]; }
have_torch || { [ -n "${BIRKHOFF_TORCH:-}" ] && stop "BIRKHOFF_TORCH=$BIRKHOFF_TORCH holds no include/ATen/core/Tensor.h and lib/$library.so"; }
# Python's libraries and clang-format for tests.
tools=$deps/test-tools-$(sha256sum cmake/test_tools.txt | cut -c1-8)
[ "$goal" = test ] || tools=""
have_tools() { [ -z "$tools" ] || [ -e "$tools/sympy" ]; }
if ! have_torch || { [ "$install" = 1 ] && ! have_tools; }; then packages+=(python3-pip); fi

install_packages() {
  command -v dpkg-query >/dev/null || stop "this is not Debian or Ubuntu; load modules for MPI, HDF5 and LibTorch and see docs/install.md"
  local missing=() package
  for package in "${packages[@]}"; do
    dpkg-query -W -f '${Status}\n' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$install" = 0 ] || [ "$(id -u)" != 0 ]; then
    stop "missing packages: ${missing[*]}
  install them as root:  apt-get update && apt-get install --no-install-recommends ${missing[*]}"
  fi
  say "Installing ${#missing[@]} packages: ${missing[*]}"
  apt-get update -qq
  # Installing Slurm must not start its services.
  local policy=/usr/sbin/policy-rc.d made_policy="" status=0
  [ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' >$policy; chmod +x $policy; made_policy=1; }
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null || status=$?
  [ -z "$made_policy" ] || rm $policy
  return $status
}

# Whether loader and compiler find all libraries of cmake/cuda_libraries.txt on this machine.
have_cuda_libraries() {
  local known name
  [ -e "${CUDA_HOME:-/usr/local/cuda}/include/nccl.h" ] || [ -e /usr/include/nccl.h ] || return 1
  known=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p)
  for name in libcublas.so.13 libcublasLt.so.13 libcudnn.so.9 libcufft.so.12 libcurand.so.10 libcusolver.so.12 libcusparse.so.12 \
      libnccl.so.2 libnvJitLink.so.13 libnvrtc.so.13; do
    grep -qF "$name " <<<"$known" || return 1
  done
}

have_nvcc() {
  local folder
  for folder in "${CUDA_HOME:-}" /usr/local/cuda; do
    [[ $("$folder/bin/nvcc" --version 2>/dev/null) != *"release 13."* ]] || return 0
  done
  return 1
}

install_torch() {
  local lists=(-r cmake/libtorch.txt) megabytes=531
  if [ -n "$cuda" ]; then
    lists+=(-r cmake/libtorch_cuda.txt) megabytes=763
    have_cuda_libraries || { lists+=(-r cmake/cuda_libraries.txt); megabytes=$((megabytes + 1800)); }
    have_nvcc || { lists+=(-r cmake/cuda_toolkit.txt); megabytes=$((megabytes + 150)); }
  fi
  ! have_torch || return 0
  [ "$install" = 1 ] || stop "LibTorch is missing in $torch; without --no-install this script fetches it ($megabytes MB), or set BIRKHOFF_TORCH"
  [ "$(uname -m)" = x86_64 ] || stop "the pinned LibTorch is for x86_64, this is $(uname -m): set BIRKHOFF_TORCH to a LibTorch 2.11"
  say "Installing LibTorch 2.11.0 into $pinned ($megabytes MB to fetch)"
  mkdir -p "$deps"
  rm -rf "$pinned.part"
  # Installed under another name, then renamed: an interrupted download leaves nothing that looks complete.
  python3 -m pip install --quiet --no-deps --require-hashes --only-binary=:all: --python-version 3.11 \
    --target "$pinned.part" "${lists[@]}" 2> >(grep -v 'Running pip as' >&2)
  # nvcc looks for its libraries in lib64; the wheels have lib.
  [ -z "$cuda" ] || ln -s lib "$pinned.part/nvidia/cu13/lib64"
  # For all users, whatever the umask.
  [ "$(id -u)" != 0 ] || chmod -R a+rX "$deps"
  rm -rf "$pinned"
  mv "$pinned.part" "$pinned"
}

install_tools() {
  ! have_tools || return 0
  # Without them, the tests that need them are skipped.
  [ "$install" = 1 ] && [ "$(uname -m)" = x86_64 ] || { tools=""; return 0; }
  say "Installing Python's libraries and clang-format for tests into $tools (11 MB to fetch)"
  rm -rf "$tools.part"
  python3 -m pip install --quiet --no-deps --require-hashes --only-binary=:all: --target "$tools.part" -r cmake/test_tools.txt \
    2> >(grep -v 'Running pip as' >&2) || { tools=""; return 0; }
  [ "$(id -u)" != 0 ] || chmod -R a+rX "$tools.part"
  mv "$tools.part" "$tools"
}

# Other users often run what root builds.
warn_if_root_only() {
  [ "$(id -u)" = 0 ] && ! others_can_read "$torch/lib" || return 0
  printf 'bootstrap: LibTorch is in %s, which other users cannot read, so only root can run this build; move %s to %s and build again to share it\n' \
    "$torch" "$name" "$shared" >&2
}

build() {
  local folder=build/$preset log
  local settings=("BIRKHOFF_TORCH:PATH=$torch") setting configured=1
  [ -z "$tools" ] || settings+=("BIRKHOFF_TEST_TOOLS:PATH=$tools")
  [ -e "$folder/build.ninja" ] || configured=0
  for setting in "${settings[@]}"; do
    grep -qsxF "$setting" "$folder/CMakeCache.txt" || configured=0
  done
  if [ $configured = 0 ]; then
    say "Configuring $folder"
    log=$(mktemp)
    cmake --preset "$preset" "${settings[@]/#/-D}" >"$log" 2>&1 || { cat "$log" >&2; stop "configuring failed"; }
    rm -f "$log"
  fi
  say "Building $folder with $jobs jobs"
  cmake --build --preset "$preset" --parallel "$jobs" --target "$target"
}

# "NAME: why" for each skipped test of a JUnit report of ctest's.
skipped_tests() { # REPORT
  awk '
    /<testcase / { name = $0; sub(/.*<testcase name="/, "", name); sub(/".*/, "", name); skipped = 0; why = "" }
    /<skipped/ { skipped = 1 }
    next_is_why { if (why == "") why = $0; next_is_why = 0 }
    /: Skipped$/ { next_is_why = 1 }
    /SKIPPED: / { if (why == "") { why = $0; sub(/.*SKIPPED: /, "", why) } }
    /<\/testcase>/ { if (skipped) print name ": " why }' "$1"
}

# One test more than there are cores: some wait more than they compute.
run_tests() {
  local status=0 report=$PWD/build/$preset/tests.xml skipped
  say "Testing $preset"
  ctest --preset "$preset" --parallel "$(($(nproc) + 1))" --progress --output-junit "$report" --test-output-size-passed 65536 || status=$?
  skipped=$(skipped_tests "$report")
  [ -z "$skipped" ] || say "Skipped tests:"$'\n'"$skipped"
  return $status
}

demo() {
  [ "$preset" = cpu ] || stop "the demo runs the preset cpu"
  local birkhoff=build/cpu/birkhoff out=build/demo corpus=build/demo/corpus run=build/demo/run stamp
  # An earlier demo continues only with the same headers and the same configuration.
  stamp=$({ find /usr/include -type f -printf '%p %s %T@\n' | sort; "$birkhoff" config print configs/quickstart.txtpb; } | sha256sum)
  [ "$(cat "$out/stamp" 2>/dev/null)" = "$stamp" ] || rm -rf "$out"
  mkdir -p "$out"
  echo "$stamp" >"$out/stamp"
  say "1/6 Corpus: the headers under /usr/include, byte by byte"
  "$birkhoff" prepare --out "$corpus" --tokenizer bytes --valid 0.01 /usr/include
  say "2/6 Training a causal Sinkhorn Transformer on two MPI ranks"
  "$birkhoff" train configs/quickstart.txtpb --run "$run" --ranks 2 --set data.corpus="$corpus"
  say "3/6 Held-out bits per byte, compared with a byte-bigram model of the same corpus"
  "$birkhoff" eval "$run"
  "$birkhoff" inspect "$corpus" --bigram
  say "4/6 Verifying the corpus and the checkpoint"
  "$birkhoff" verify "$corpus"
  "$birkhoff" verify "$run"
  say "5/6 Loss curve: $run/loss.svg"
  ls -l "$run/loss.svg"
  say "6/6 A sample"
  "$birkhoff" sample "$run" --prompt '#include <' --tokens 300 --temperature 0.7
}

install_packages
install_torch
install_tools
warn_if_root_only
build
case $goal in
  build) ;;
  test) run_tests ;;
  demo) demo ;;
esac
