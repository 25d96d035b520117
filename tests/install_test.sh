#!/usr/bin/env bash
# Installs a finished build, moves the folder, and uses what is in it: the program, find_package(Birkhoff) from another project,
# Python's import birkhoff_ops if this Python has PyTorch, and both kinds of module file.
#   tests/install_test.sh [BUILD]     BUILD: default build/cpu
set -euo pipefail
cd "$(dirname "$0")/.."

stop() { printf 'install_test: %s\n' "$*" >&2; exit 1; }
build=$(readlink -f "${1:-build/cpu}")
cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }
torch=$(cached BIRKHOFF_TORCH)
version=$(cached CMAKE_PROJECT_VERSION)
place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT
cmake --install "$build" --prefix "$place/made" --strip >/dev/null
prefix="$place/another place"  # a space, because people have them
mv "$place/made" "$prefix"

# The program runs alone, and so does its way from the configurations.
clean() { env -i PATH=/usr/bin:/bin HOME="$place" "$@" || stop "exit code $? of: $*"; }
clean "$prefix/bin/birkhoff" --version >/dev/null
clean "$prefix/bin/birkhoff" config print "$prefix/share/birkhoff/configs/baby_gpt_routing.txtpb" >/dev/null
[ -e "$prefix/share/doc/birkhoff/docs/install.md" ] || stop "the documents are missing"
for file in "$prefix/bin/birkhoff" "$prefix"/lib*/libbirkhoff_ops.so; do
  path=$(readelf -d "$file" | sed -n 's/.*R\(UN\)\{0,1\}PATH.*\[\(.*\)\]/\2/p')
  # shellcheck disable=SC2016
  [[ $path == *'$ORIGIN'* && $path == *"$torch/lib"* && $path != *"$build"* ]] || stop "$file looks for libraries in '$path'"
done

# A project of a user.
cmake -G Ninja -S tests/install -B "$place/consumer" -DCMAKE_PREFIX_PATH="$prefix" -DLIBTORCH="$torch" >"$place/log" 2>&1 || stop "$(cat "$place/log")"
cmake --build "$place/consumer" >"$place/log" 2>&1 || stop "$(cat "$place/log")"
said=$(clean "$place/consumer/consumer")
[[ $said == "built for LibTorch 2."* ]] || stop "the consumer says '$said'"

# Python.
python=$(command -v python3 || true)
modules=$(dirname "$prefix"/lib*/python/birkhoff_ops.py)
if [ -n "$python" ] && PYTHONPATH=$(dirname "$torch") "$python" -c 'import torch' 2>/dev/null; then
  PYTHONPATH=$modules:$(dirname "$torch") "$python" -c 'import birkhoff_ops, torch; torch.ops.birkhoff.dense_attention' ||
    stop "Python cannot import birkhoff_ops"
  python="and Python"
else
  python="(no PyTorch here: Python was not tried)"
fi

# Module files: what they add to the environment. A few lines stand in for the modules system.
folder="$prefix/share/birkhoff/modulefiles/birkhoff"
wanted="PATH=$prefix/bin CMAKE_PREFIX_PATH=$prefix PYTHONPATH=$modules BIRKHOFF_HOME=$prefix"
if command -v tclsh >/dev/null; then
  said=$(tclsh <<TCL
set ModulesCurrentModulefile {$folder/$version}
set said {}
proc module-whatis {text} {}
proc prepend-path {name value} { lappend ::said "\$name=\$value" }
proc setenv {name value} { lappend ::said "\$name=\$value" }
source \$ModulesCurrentModulefile
puts [join \$said " "]
TCL
)
  [ "$said" = "$wanted" ] || stop "the Tcl module file gives '$said'"
fi
lua=$(command -v lua || command -v lua5.4 || command -v lua5.3 || command -v lua5.1 || true)
if [ -n "$lua" ]; then
  said=$("$lua" - "$folder/$version.lua" <<'LUA'
local file, said = arg[1], {}
function myFileName() return file end
function pathJoin(...) return table.concat({...}, "/") end
function whatis() end
function help() end
function prepend_path(name, value) said[#said + 1] = name .. "=" .. value end
setenv = prepend_path
dofile(file)
print(table.concat(said, " "))
LUA
)
  [ "$said" = "$wanted" ] || stop "the Lua module file gives '$said'"
fi
echo "install_test: passed $python"
