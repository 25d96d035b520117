# All external packages, as one imported target each. Errors name the missing package and how to get
# it.

find_package(Threads REQUIRED)

# --- LibTorch: our own targets. The wheel's find_package(Torch) enables CUDA even for a CPU build
# and breaks
# C++20 with CMake 3.25 (docs/architecture.md, "LibTorch").
set(BIRKHOFF_TORCH "$ENV{BIRKHOFF_TORCH}" CACHE PATH
  "LibTorch: the folder that holds include/ and lib/")
if(NOT BIRKHOFF_TORCH)
  # As in bootstrap.sh, deps_folder.
  set(_deps "$ENV{BIRKHOFF_DEPS}")
  if(NOT _deps)
    set(_deps "$ENV{HOME}/.cache/birkhoff")
    if(NOT EXISTS "${_deps}/torch-2.11.0")
      set(_deps /var/cache/birkhoff)
    endif()
  endif()
  set(BIRKHOFF_TORCH "${_deps}/torch-2.11.0/torch" CACHE PATH "" FORCE)
endif()
if(NOT EXISTS "${BIRKHOFF_TORCH}/include/ATen/core/Tensor.h")
  message(FATAL_ERROR
    "LibTorch not found in '${BIRKHOFF_TORCH}'. Run ./bootstrap.sh build, or pass "
    "-DBIRKHOFF_TORCH=<folder with include/ and lib/> (a LibTorch 2.11 with the CXX11 ABI).")
endif()
set(_torch_dirs "${BIRKHOFF_TORCH}/include" "${BIRKHOFF_TORCH}/include/torch/csrc/api/include")
add_library(birkhoff_torch INTERFACE)
# -idirafter: the wheel ships headers of other libraries (protobuf 3.13, fmt 12) that must not
# shadow the system's.
foreach(_dir IN LISTS _torch_dirs)
  target_compile_options(birkhoff_torch INTERFACE "SHELL:-idirafter ${_dir}")
endforeach()
target_link_libraries(birkhoff_torch INTERFACE "${BIRKHOFF_TORCH}/lib/libtorch_cpu.so"
  "${BIRKHOFF_TORCH}/lib/libc10.so")
target_link_options(birkhoff_torch INTERFACE "-Wl,-rpath,${BIRKHOFF_TORCH}/lib"
  "-Wl,--allow-shlib-undefined")

# --- CUDA 13.0: toolkit, LibTorch's GPU part, NCCL. Kernels use only the toolkit (birkhoff_kernels
# in
# BirkhoffTargets.cmake). Everything else that uses LibTorch sees the headers of all three and links
# them.
if(BIRKHOFF_CUDA)
  # Wheels that ./bootstrap.sh --cuda installed next to LibTorch come first: LibTorch was built with
  # them.
  cmake_path(GET BIRKHOFF_TORCH PARENT_PATH _beside)
  set(_wheels "${_beside}/nvidia")
  set(_toolkits "$ENV{CUDA_HOME}" "${_wheels}/cu13" /usr/local/cuda)
  list(TRANSFORM _toolkits APPEND /bin OUTPUT_VARIABLE _bins)
  find_program(CMAKE_CUDA_COMPILER nvcc HINTS ${_bins})
  if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR
      "nvcc not found. Run ./bootstrap.sh build --cuda, or set CUDA_HOME to a CUDA 13.0 toolkit.")
  endif()
  # birkhoff_kernels names the architectures: CMake 3.25 does not know 90a, nor nvcc 13's option for
  # C++20.
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  enable_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER_VERSION MATCHES "^13\\.")
    message(FATAL_ERROR
      "${CMAKE_CUDA_COMPILER} is from CUDA ${CMAKE_CUDA_COMPILER_VERSION}, but LibTorch's GPU part "
      "needs CUDA 13: "
      "set CUDA_HOME to a CUDA 13 toolkit, or run ./bootstrap.sh build --cuda.")
  endif()
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "")  # birkhoff_kernels sets all flags
  cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH _bin)
  cmake_path(GET _bin PARENT_PATH BIRKHOFF_CUDA_HOME)
  set(_cuda_libraries "${_wheels}/cu13/lib" "${_wheels}/nccl/lib" "${BIRKHOFF_CUDA_HOME}/lib64"
    "${BIRKHOFF_CUDA_HOME}/lib")
  find_path(CUDA_RUNTIME_INCLUDE_DIR cuda_runtime_api.h REQUIRED HINTS
    "${BIRKHOFF_CUDA_HOME}/include")
  find_path(NCCL_INCLUDE_DIR nccl.h REQUIRED HINTS "${_wheels}/nccl/include"
    "${BIRKHOFF_CUDA_HOME}/include")
  find_library(CUDA_RUNTIME_LIBRARY NAMES libcudart.so.13 REQUIRED HINTS ${_cuda_libraries})
  find_library(NCCL_LIBRARY NAMES libnccl.so.2 REQUIRED HINTS ${_cuda_libraries})
  if(NOT EXISTS "${BIRKHOFF_TORCH}/lib/libtorch_cuda.so")
    message(FATAL_ERROR
      "LibTorch in '${BIRKHOFF_TORCH}' has no lib/libtorch_cuda.so: take one built for CUDA 13.0, "
      "or run ./bootstrap.sh build --cuda.")
  endif()
  add_library(birkhoff_cuda INTERFACE)
  target_include_directories(birkhoff_cuda SYSTEM INTERFACE ${CUDA_RUNTIME_INCLUDE_DIR}
    ${NCCL_INCLUDE_DIR})
  target_compile_definitions(birkhoff_cuda INTERFACE BIRKHOFF_CUDA)
  set(_libraries "${BIRKHOFF_TORCH}/lib")
  # libtorch_cuda registers its operations when it is loaded, so it must stay linked although no
  # symbol of it is used.
  target_link_libraries(birkhoff_cuda INTERFACE
    "-Wl,--no-as-needed,${_libraries}/libtorch_cuda.so,${_libraries}/libc10_cuda.so,--as-needed"
    ${CUDA_RUNTIME_LIBRARY} ${NCCL_LIBRARY})
  target_link_libraries(birkhoff_torch INTERFACE birkhoff_cuda)
endif()

# --- Protobuf: static, with hidden symbols. Debian's libsentencepiece exports its own Protobuf; two
# visible
# copies in one process abort at the first model load.
set(Protobuf_USE_STATIC_LIBS ON)
find_package(Protobuf 3.21 REQUIRED)
find_package(ZLIB REQUIRED)
add_library(birkhoff_protobuf INTERFACE)
target_link_libraries(birkhoff_protobuf INTERFACE protobuf::libprotobuf ZLIB::ZLIB Threads::Threads)
target_link_options(birkhoff_protobuf INTERFACE "-Wl,--exclude-libs,libprotobuf.a")

# --- MPI (C interface only; the C++ bindings are gone from Open MPI 5)
find_package(MPI REQUIRED COMPONENTS C)
add_library(birkhoff_mpi INTERFACE)
target_link_libraries(birkhoff_mpi INTERFACE MPI::MPI_C)
target_compile_definitions(birkhoff_mpi INTERFACE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
# For --version: the implementation, where it can be asked at build time; else MPI's own version.
execute_process(COMMAND ${MPIEXEC_EXECUTABLE} --version OUTPUT_VARIABLE BIRKHOFF_MPI_VERSION
  ERROR_QUIET)
string(REGEX REPLACE "\n.*" "" BIRKHOFF_MPI_VERSION "${BIRKHOFF_MPI_VERSION}")
if(NOT BIRKHOFF_MPI_VERSION)
  set(BIRKHOFF_MPI_VERSION "${MPI_C_VERSION}")
endif()

# --- HDF5 (serial C library: every rank writes its own files)
find_package(HDF5 REQUIRED COMPONENTS C)
add_library(birkhoff_hdf5 INTERFACE)
target_include_directories(birkhoff_hdf5 SYSTEM INTERFACE ${HDF5_C_INCLUDE_DIRS})
target_link_libraries(birkhoff_hdf5 INTERFACE ${HDF5_C_LIBRARIES})

find_package(PkgConfig REQUIRED)
pkg_check_modules(sentencepiece REQUIRED IMPORTED_TARGET sentencepiece)
pkg_check_modules(zstd REQUIRED IMPORTED_TARGET libzstd)
# --- Formats of image files. minizip, zlib's reader of zip files, has a 64-bit interface only if
# asked.
find_package(PNG REQUIRED)
find_package(JPEG REQUIRED)
pkg_check_modules(minizip REQUIRED IMPORTED_TARGET minizip)
add_library(birkhoff_images INTERFACE)
target_link_libraries(birkhoff_images INTERFACE PNG::PNG JPEG::JPEG PkgConfig::minizip ZLIB::ZLIB)

find_package(fmt REQUIRED)
find_package(CLI11 REQUIRED)
find_package(nlohmann_json REQUIRED)
find_path(XXHASH_INCLUDE_DIR xxhash.h REQUIRED)
add_library(birkhoff_xxhash INTERFACE)
target_include_directories(birkhoff_xxhash SYSTEM INTERFACE ${XXHASH_INCLUDE_DIR})
target_compile_definitions(birkhoff_xxhash INTERFACE XXH_INLINE_ALL)

if(BIRKHOFF_BUILD_TESTS)
  find_package(GTest REQUIRED)
  find_path(RAPIDCHECK_INCLUDE_DIR rapidcheck.h REQUIRED)
  find_library(RAPIDCHECK_LIBRARY rapidcheck REQUIRED)
endif()
