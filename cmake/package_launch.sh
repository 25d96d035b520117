#!/usr/bin/env bash
# Starts the program of a package (cmake/package.sh) that has this script's name. The same script starts all programs, including
# orted, which mpirun starts on other machines. So each process of a job finds Open MPI and LibTorch in the same way.
set -euo pipefail
name=$(basename "$0")
package=$(dirname "$(dirname "$(readlink -f "$0")")")
stop() { printf '%s: %s\n' "$name" "$*" >&2; exit 2; }

# Open MPI and PMIx were built for other folders. The package has no hwloc plugins, and must not load those of the machine's hwloc.
export PATH=$package/bin:$PATH OPAL_PREFIX=$package OPAL_PKGLIBDIR=$package/lib/openmpi OPAL_PKGDATADIR=$package/share/openmpi \
  OPAL_SYSCONFDIR=$package/etc/openmpi PMIX_PKGLIBDIR=$package/lib/pmix PMIX_PKGDATADIR=$package/share/pmix \
  HWLOC_PLUGINS_PATH=$package/lib/hwloc
# Without ssh, the plugin that starts ranks on other machines ends mpirun, even if all ranks are on this machine.
command -v ssh >/dev/null || export OMPI_MCA_plm=${OMPI_MCA_plm:-^rsh}

find_torch() { # the folder of LibTorch's libraries
  local folders folder
  [ -z "${BIRKHOFF_TORCH:-}" ] || { echo "$BIRKHOFF_TORCH/lib"; return; }
  IFS=: read -ra folders <<<"${LD_LIBRARY_PATH:-}"
  for folder in "${folders[@]}"; do
    [ ! -e "$folder/libtorch_cpu.so" ] || { echo "$folder"; return; }
  done
  # The folder of Python's torch, without loading it.
  python3 -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0] + "/lib")' 2>/dev/null
}

if [ "$name" = birkhoff ] || [ "$name" = gpu_suite ]; then
  found=$(find_torch) || stop "LibTorch not found: set BIRKHOFF_TORCH to its folder (with lib/), or LD_LIBRARY_PATH, or let python3 import torch"
  # Only a package for GPUs has tests.
  [ -d "$package/tests" ] && library=libtorch_cuda.so || library=libtorch_cpu.so
  [ -e "$found/$library" ] || stop "LibTorch in '$found' has no $library: set BIRKHOFF_TORCH to the folder of another LibTorch, with lib/"
  torch=$(readlink -f "$found")
  header=$torch/../include/torch/headeronly/version.h
  wanted=$(sed -n 's/^LibTorch \([0-9]*\.[0-9]*\).*/\1/p' "$package/versions")
  [ ! -e "$header" ] || [ "$(sed -n 's/^#define TORCH_VERSION_\(MAJOR\|MINOR\) //p' "$header" | paste -sd .)" = "$wanted" ] ||
    stop "LibTorch in '$torch' is not version $wanted: set BIRKHOFF_TORCH to the folder of one that is, with lib/"
  # LibTorch's wheel finds the CUDA wheels next to it by itself; the program also needs two of their libraries.
  export LD_LIBRARY_PATH=$torch:$torch/../../nvidia/cu13/lib:$torch/../../nvidia/nccl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi

case $name in
  gpu_suite) BIRKHOFF_PROGRAM=$package/bin/birkhoff BIRKHOFF_TORCH=$torch/.. exec "$package/tests/gpu_suite.sh" --build "$package" "$@" ;;
  # From its own path in bin/, mpirun derives the path of orted on other machines.
  *) exec -a "$package/bin/$name" "$package/libexec/$name" "$@" ;;
esac
