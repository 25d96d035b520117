#!/usr/bin/env bash
# Makes a folder that can be copied anywhere and runs on a machine that has LibTorch 2.11 (for GPUs: also CUDA 13) and none of the
# packages that bootstrap.sh installs. `cmake --build --preset NAME --target package` runs this script.
#   cmake/package.sh BUILD [OUT]
# BUILD: a finished build with Debian's or Ubuntu's Open MPI 4. The folder is OUT/birkhoff-VERSION-NAME, NAME the last part of
# BUILD; OUT is BUILD/package unless given. In it:
#   bin/        the commands: birkhoff, mpirun, mpiexec, gpu_suite; all are cmake/package_launch.sh
#   libexec/    the programs that these commands start
#   lib/        the libraries that they need, plugins of Open MPI and PMIx in their own folders; libbirkhoff_ops.so for PyTorch
#   tests/      for GPUs: *_gpu_test and gpu_suite.sh
#   configs/, etc/, share/ (Open MPI's configuration and texts), README.md, versions
set -euo pipefail  # pipefail: a reader that closes a pipe early would fail it, so all readers here read to the end
cd "$(dirname "$0")/.."

stop() { printf 'package: %s\n' "$*" >&2; exit 1; }
[ $# -ge 1 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
build=${1%/} out=${2:-${1%/}/package}
limit=80000000

cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }
for tool in patchelf strip; do
  command -v $tool >/dev/null || stop "$tool is missing: apt-get install patchelf binutils"
done
[ -x "$build/birkhoff" ] || stop "no program $build/birkhoff: build it first"
torch=$(cached BIRKHOFF_TORCH)
mpirun=$(dirname "$(cached MPIEXEC_EXECUTABLE)")/mpirun
[ -x "$mpirun" ] || stop "mpirun is missing next to the mpiexec of $build/CMakeCache.txt: install Open MPI 4 (openmpi-bin) and configure again"
[[ $("$mpirun" --version) == *"(Open MPI) 4."* ]] || stop "$mpirun is not from Open MPI 4, the only version that this script can relocate"
tests=()
if [ "$(cached BIRKHOFF_CUDA)" = ON ]; then
  # Only the tests that the build knows; its folder may hold tests of older builds.
  mapfile -t tests < <(ctest --test-dir "$build" -N -V -L gpu | grep -o '/[^ "]*_gpu_test' | sort -u)
  [ ${#tests[@]} -gt 0 ] || stop "$build knows no *_gpu_test: configure with BIRKHOFF_BUILD_TESTS=ON and build"
  for test in "${tests[@]}"; do [ -x "$test" ] || stop "no program $test: build it first"; done
fi

whole=$out/birkhoff-$(cached CMAKE_PROJECT_VERSION)-$(basename "$build")
package=$whole.part  # renamed when it is complete
rm -rf "$whole" "$package"
mkdir -p "$package"/{bin,configs,etc,lib,libexec,share}

# The target machine must have glibc, libstdc++ and libgcc, and with GPUs the libraries of CUDA and NCCL that LibTorch needs.
# The package does not contain libstdc++: a process has only one, and LibTorch and the driver there may need a newer one than
# ours. glibc cannot be packaged either; a machine whose glibc is no older than ours also has a libstdc++ that is no older.
theirs='^(ld-linux-.*|lib(c|m|dl|rt|util|pthread|resolv|stdc\+\+|gcc_s|cuda|cudart|nccl))\.so'
is_theirs() { [[ $1 =~ $theirs ]] || [ -e "$torch/lib/$1" ]; }

carry() { # FILE: copies the libraries that it needs, directly or indirectly, if they are found here
  local name path
  for name in $(patchelf --print-needed "$1"); do
    ! is_theirs "$name" && [ ! -e "$package/lib/$name" ] || continue
    path=$(ldd "$1" | awk -v name="$name" '$1 == name && $2 == "=>" && $3 ~ "^/" { print $3 }')
    [ -n "$path" ] || continue  # the check below names it
    cp -L "$path" "$package/lib/$name"
    carry "$path"
  done
}

program() { # FILE PLACE: a program and its libraries
  carry "$1"
  cp -L "$1" "$package/$2"
}

plugins() { # FOLDER PLACE: all plugins except OpenSHMEM's and those for fabrics (InfiniBand, Omni-Path, libfabric, UCX). The
  # libraries of the latter must match the target's drivers, and Debian disables them. NCCL finds fabrics by itself.
  local plugin
  mkdir "$package/$2"
  for plugin in "$1"/*.so; do
    ! patchelf --print-needed "$plugin" | grep -E '^lib(fabric|ibverbs|psm|uc[pst]|oshmem|mca_common_(ofi|ucx|verbs))' >/dev/null || continue
    program "$plugin" "$2"
  done
}

program "$build/birkhoff" libexec
program "$mpirun" libexec
program "$(dirname "$mpirun")/orted" libexec
program "$build/libbirkhoff_ops.so" lib
ln -s mpirun "$package/libexec/mpiexec"
installed() { "$(dirname "$mpirun")/ompi_info" --parsable --path "$1" | cut -d: -f3-; }
plugins "$(installed pkglibdir)" lib/openmpi
cp -rL "$(installed pkgdatadir)" "$package/share/openmpi"
cp -rL "$(installed sysconfdir)" "$package/etc/openmpi"
pmix=$(ldd "$(installed pkglibdir)"/mca_pmix_*.so | awk '$1 ~ /^libpmix\.so/ { pmix = $3 } END { print pmix }')
[ -n "$pmix" ] || stop "$mpirun has no libpmix: this script can relocate only Debian's and Ubuntu's Open MPI 4"
pmix=$(dirname "$(readlink -f "$pmix")")
plugins "$pmix/pmix" lib/pmix
cp -rL "$pmix/../share/pmix" "$package/share/pmix"
if [ ${#tests[@]} -gt 0 ]; then
  mkdir "$package/tests"
  for file in "${tests[@]}"; do program "$file" tests; done
  cp tests/gpu_suite.sh "$package/tests"
  ln -s birkhoff "$package/bin/gpu_suite"
fi
cp cmake/package_launch.sh "$package/bin/birkhoff"
for name in mpirun mpiexec orted; do ln -s birkhoff "$package/bin/$name"; done
cp -r configs/*.txtpb configs/sites "$package/configs"
awk '/^## / { on = /^## A relocatable package/ } on' docs/install.md >"$package/README.md"
[ -s "$package/README.md" ] || stop "docs/install.md has no section 'A relocatable package'"
{
  echo "commit $(git describe --always --dirty 2>/dev/null || echo unknown)"
  "$build/birkhoff" --version || stop "$build/birkhoff does not run here"
} >"$package/versions"

# Programs find lib/ by an RPATH, which also applies to the libraries and plugins they load, as long as those have none. It must be
# an RPATH and not a RUNPATH: another Open MPI or HDF5 in LD_LIBRARY_PATH, set by a cluster's modules, must not come first.
mapfile -t files < <(find "$package/lib" "$package/libexec" "$package/tests" -type f ! -name '*.sh' 2>/dev/null)
for file in "${files[@]}"; do
  chmod 755 "$file"
  strip --strip-unneeded "$file"
  if [ "$file" = "$package/lib/libbirkhoff_ops.so" ]; then
    patchelf --force-rpath --set-rpath '$ORIGIN' "$file"  # Python opens it: no program of ours knows where lib/ is
  elif [[ $file == "$package"/lib/* ]]; then
    patchelf --remove-rpath "$file"
  else
    patchelf --force-rpath --set-rpath '$ORIGIN/../lib' "$file"
  fi
  for name in $(patchelf --print-needed "$file"); do
    is_theirs "$name" || [ -e "$package/lib/$name" ] ||
      stop "${file#"$package"/} needs $name, which does not belong to LibTorch, CUDA or glibc and is not on this machine"
  done
done

size=$(du -sb "$package" | cut -f1)
megabytes=$(printf '%d.%d MB' $((size / 1000000)) $((size / 100000 % 10)))
[ "$size" -le $limit ] || stop "$package takes $megabytes, more than $((limit / 1000000)) MB: find out what grew in it"
mv "$package" "$whole"
echo "$whole: $megabytes"
