# The flags of our own code, and helpers that declare a folder's library and its tests.

add_library(birkhoff_flags INTERFACE)
target_compile_options(birkhoff_flags INTERFACE -Wall -Wextra -Wshadow -Wswitch)
if(BIRKHOFF_WERROR)
  target_compile_options(birkhoff_flags INTERFACE -Werror)
endif()
if(CMAKE_UNITY_BUILD)  # g++ takes each file of a batch for a header
  target_compile_options(birkhoff_flags INTERFACE
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
endif()
target_include_directories(birkhoff_flags INTERFACE ${CMAKE_SOURCE_DIR} ${CMAKE_BINARY_DIR}/gen)
if(BIRKHOFF_SANITIZE)
  # g++ 12 sees uninitialized values in its own <regex> when sanitizers keep it from inlining.
  # -O1, as the sanitizers' manuals advise: g++ optimizes instrumented code slowly.
  target_compile_options(birkhoff_flags INTERFACE -fsanitize=${BIRKHOFF_SANITIZE} -O1
    -fno-omit-frame-pointer -Wno-maybe-uninitialized)
  target_link_options(birkhoff_flags INTERFACE -fsanitize=${BIRKHOFF_SANITIZE})
endif()

# Most of a test's time is spent in processes and in the product's own code, so -O1 suffices. It
# compiles a third faster.
add_library(birkhoff_test_flags INTERFACE)
target_compile_options(birkhoff_test_flags INTERFACE -O1)

# birkhoff_precompile(TARGET): includes the headers that most tests use before each source of a test
# program. They are compiled
# once for all programs. Sources with their own options are left out.
function(birkhoff_precompile target)
  if(NOT BIRKHOFF_PCH)
    return()
  endif()
  if(NOT TARGET birkhoff_pch)
    file(GENERATE OUTPUT ${CMAKE_BINARY_DIR}/pch.cpp CONTENT "int main() {}\n")
    # a program, because a library has other flags
    add_executable(birkhoff_pch ${CMAKE_BINARY_DIR}/pch.cpp)
    target_link_libraries(birkhoff_pch PRIVATE cluster_base birkhoff_flags birkhoff_test_flags
      GTest::gtest GTest::gmock)
    target_precompile_headers(birkhoff_pch PRIVATE <algorithm> <chrono> <cmath> <cstdint>
      <filesystem> <functional> <map> <memory>
      <mutex> <optional> <string> <string_view> <thread> <utility> <vector> <ATen/ATen.h>
        <fmt/format.h> <gmock/gmock.h> <gtest/gtest.h>)
  endif()
  target_precompile_headers(${target} REUSE_FROM birkhoff_pch)
  # g++ 12 warns about its own <string> in precompiled headers.
  target_compile_options(${target} PRIVATE -Wno-array-bounds -Wno-restrict -Wno-stringop-overflow)
endfunction()

# birkhoff_options(SOURCES a.cpp ... OPTIONS -O3 ...): gives single sources their own options. Each
# is compiled alone, without precompiled headers.
function(birkhoff_options)
  cmake_parse_arguments(ARG "" "" "SOURCES;OPTIONS" ${ARGN})
  set_source_files_properties(${ARG_SOURCES} PROPERTIES COMPILE_OPTIONS "${ARG_OPTIONS}"
    SKIP_PRECOMPILE_HEADERS ON)
endfunction()

# birkhoff_library(NAME SOURCES a.cpp ... LINKS other ...): one static library per folder. LINKS
# define the layers: a library
# can use only what it links, and tests/layering_test checks the includes against the same table.
function(birkhoff_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINKS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC ${ARG_LINKS} birkhoff_flags)
endfunction()

# birkhoff_optimized(LIBRARY SOURCES a.cpp ... OPTIONS -O3 ...): further sources of a folder's
# library, which share options and are compiled in batches. With sanitizers their -O1 wins.
function(birkhoff_optimized library)
  cmake_parse_arguments(ARG "" "" "SOURCES;OPTIONS" ${ARGN})
  get_target_property(links ${library} LINK_LIBRARIES)
  add_library(${library}_optimized OBJECT ${ARG_SOURCES})
  target_link_libraries(${library}_optimized PRIVATE ${links})
  target_compile_options(${library}_optimized PRIVATE ${ARG_OPTIONS})
  target_sources(${library} PRIVATE $<TARGET_OBJECTS:${library}_optimized>)
endfunction()

# birkhoff_simd(LIBRARY [SETS kAvx2 ...] SOURCES a.simd.cpp ...): CPU kernels of a folder's library,
# compiled once for each instruction set, or for each of SETS that this processor family has.
# BIRKHOFF_SIMD is the set's name in cluster/base/instruction_set.h. The program chooses one at run
# time.
function(birkhoff_simd library)
  cmake_parse_arguments(ARG "" "" "SETS;SOURCES" ${ARGN})
  set(sets kPortable)
  if(CMAKE_SYSTEM_PROCESSOR STREQUAL x86_64)
    list(APPEND sets kAvx2 kAvx512 kAvx512Bf16 kAmxBf16)
  endif()
  set(kPortable)
  set(kAvx2 -mavx2 -mfma)
  set(kAvx512 -mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma -mprefer-vector-width=512)
  set(kAvx512Bf16 ${kAvx512} -mavx512bf16)
  set(kAmxBf16 ${kAvx512Bf16} -mamx-tile -mamx-bf16)
  foreach(set IN LISTS sets)
    if(ARG_SETS AND NOT set IN_LIST ARG_SETS)
      continue()
    endif()
    add_library(${library}_${set} OBJECT ${ARG_SOURCES})
    target_link_libraries(${library}_${set} PRIVATE birkhoff_flags)
    set_target_properties(${library}_${set} PROPERTIES UNITY_BUILD OFF)
    target_compile_definitions(${library}_${set} PRIVATE BIRKHOFF_SIMD=${set})
    # With -O1, which sanitizers ask for, only -fexpensive-optimizations fuses multiplications and
    # additions. Without it a
    # sanitized build would round differently, and its errors would exceed the bounds of the tests.
    # Functions start at cache lines, so that the speed of a loop does not depend on what is linked
    # before it.
    target_compile_options(${library}_${set} PRIVATE -O3 -ffp-contract=fast
      -fexpensive-optimizations -falign-functions=64 ${${set}})
    target_sources(${library} PRIVATE $<TARGET_OBJECTS:${library}_${set}>)
  endforeach()
endfunction()

# birkhoff_kernels(LIBRARY SOURCES a.cu ...): GPU kernels of a folder's library, if CUDA is on. They
# are compiled without LibTorch's headers and options: only the .cpp next to a kernel handles
# tensors. There is machine code for each of BIRKHOFF_GPU_ARCHITECTURES (A100 is 80, H100 and H200
# are 90a), and PTX of 80, if it is one of them, for later GPUs. All of it is compressed and in one
# shared library to keep packages small: otherwise each program and test would carry its own copy.
# The preset cuda-debug adds line numbers for profilers and sanitizers.
set(BIRKHOFF_KERNEL_FLAGS -O3 --compress-mode=size --Werror all-warnings -Xcompiler=-Wall,-Wextra)
foreach(architecture IN LISTS BIRKHOFF_GPU_ARCHITECTURES)
  list(APPEND BIRKHOFF_KERNEL_FLAGS
    -gencode arch=compute_${architecture},code=sm_${architecture})
endforeach()
if("80" IN_LIST BIRKHOFF_GPU_ARCHITECTURES)
  list(APPEND BIRKHOFF_KERNEL_FLAGS -gencode arch=compute_80,code=compute_80)
endif()
if(BIRKHOFF_SYNC_LAUNCHES)
  list(APPEND BIRKHOFF_KERNEL_FLAGS -lineinfo)
endif()
function(birkhoff_kernels library)
  cmake_parse_arguments(ARG "" "" "SOURCES" ${ARGN})
  if(NOT BIRKHOFF_CUDA)
    return()
  endif()
  add_library(${library}_kernels OBJECT ${ARG_SOURCES})
  target_include_directories(${library}_kernels PRIVATE ${CMAKE_SOURCE_DIR})
  list(JOIN BIRKHOFF_KERNEL_FLAGS " " flags)
  target_compile_options(${library}_kernels PRIVATE "SHELL:${flags}")
  set_target_properties(${library}_kernels PROPERTIES POSITION_INDEPENDENT_CODE ON)
  if(NOT TARGET birkhoff_gpu_kernels)
    # Includes the code that a launch calls. libfmt is compiled in, so that libbirkhoff_ops.so does
    # not need libfmt.
    add_library(birkhoff_gpu_kernels SHARED ${CMAKE_SOURCE_DIR}/cluster/base/gpu/check.cpp)
    target_include_directories(birkhoff_gpu_kernels SYSTEM PRIVATE ${CUDA_RUNTIME_INCLUDE_DIR})
    target_link_libraries(birkhoff_gpu_kernels PRIVATE fmt::fmt-header-only birkhoff_flags
      ${CUDA_RUNTIME_LIBRARY})
    set_target_properties(birkhoff_gpu_kernels PROPERTIES VISIBILITY_INLINES_HIDDEN ON
      LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
    if(BIRKHOFF_SYNC_LAUNCHES)
      target_compile_definitions(birkhoff_gpu_kernels PRIVATE BIRKHOFF_SYNC_LAUNCHES)
    endif()
  endif()
  target_sources(birkhoff_gpu_kernels PRIVATE $<TARGET_OBJECTS:${library}_kernels>)
  target_link_libraries(${library} PUBLIC birkhoff_gpu_kernels)
  list(TRANSFORM ARG_SOURCES PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  set_property(GLOBAL APPEND PROPERTY BIRKHOFF_KERNEL_SOURCES ${ARG_SOURCES})
endfunction()

# birkhoff_test(NAME SOURCES ... LINKS ... [LABEL unit] [RANKS 1 2 4] [TIMEOUT seconds]): one
# GoogleTest program.
# With RANKS ctest starts it under mpiexec once for each count (label mpi); otherwise as a plain
# process (label unit).
# LABEL gpu: fails without a GPU. GPU tests without RANKS become one program, birkhoff_gpu_test, to
# keep packages small.
# tests/gpu_suite.sh and the target package find such programs by the end of their name, _gpu_test.
function(birkhoff_test name)
  cmake_parse_arguments(ARG "" "LABEL;TIMEOUT" "SOURCES;LINKS;RANKS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  if(BIRKHOFF_SANITIZE)
    math(EXPR ARG_TIMEOUT "4 * ${ARG_TIMEOUT}")  # sanitized code takes about that much longer
  endif()
  if(ARG_LABEL STREQUAL gpu AND NOT ARG_RANKS AND NOT name STREQUAL birkhoff_gpu_test)
    if(NOT TARGET birkhoff_gpu_test)
      birkhoff_test(birkhoff_gpu_test LABEL gpu TIMEOUT 600)
    endif()
    foreach(source IN LISTS ARG_SOURCES)
      cmake_path(ABSOLUTE_PATH source NORMALIZE)
      target_sources(birkhoff_gpu_test PRIVATE ${source})
    endforeach()
    target_link_libraries(birkhoff_gpu_test PRIVATE ${ARG_LINKS})
    return()
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_LINKS} birkhoff_flags birkhoff_test_flags
    GTest::gtest GTest::gmock)
  target_compile_definitions(${name} PRIVATE BIRKHOFF_SOURCE_DIR="${CMAKE_SOURCE_DIR}"
    BIRKHOFF_PROGRAM="${CMAKE_BINARY_DIR}/birkhoff")
  birkhoff_precompile(${name})
  if(NOT ARG_LABEL)
    set(ARG_LABEL unit)
    if(ARG_RANKS)
      set(ARG_LABEL mpi)
    endif()
  endif()
  if(ARG_LABEL STREQUAL gpu)
    set_property(GLOBAL APPEND PROPERTY BIRKHOFF_GPU_TESTS ${name})
  endif()
  if(ARG_RANKS)
    foreach(ranks IN LISTS ARG_RANKS)
      add_test(NAME ${name}.${ranks} COMMAND ${MPIEXEC_EXECUTABLE} --oversubscribe --bind-to none
        ${MPIEXEC_NUMPROC_FLAG} ${ranks} $<TARGET_FILE:${name}>)
      set_tests_properties(${name}.${ranks} PROPERTIES LABELS ${ARG_LABEL} TIMEOUT ${ARG_TIMEOUT}
        PROCESSORS 2
        FAIL_REGULAR_EXPRESSION "Running 0 tests"
        ENVIRONMENT
          "${BIRKHOFF_MPI_TEST_ENVIRONMENT};BIRKHOFF_TEST_RANKS=${ranks};OMP_NUM_THREADS=1")
    endforeach()
  else()
    if(ARG_LABEL STREQUAL gpu)
      target_link_libraries(${name} PRIVATE gpu_test_main)
    else()
      target_link_libraries(${name} PRIVATE GTest::gtest_main)
    endif()
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES LABELS ${ARG_LABEL} TIMEOUT ${ARG_TIMEOUT}
      FAIL_REGULAR_EXPRESSION "Running 0 tests"
      ENVIRONMENT "${BIRKHOFF_TEST_ENVIRONMENT};OMP_NUM_THREADS=1")
  endif()
endfunction()

# The environment of every test process: Open MPI accepts root (CI, containers), sanitizers ignore
# Open MPI's own leaks, and one thread, because ctest runs a test on each core. Tests of threads set
# their number themselves.
set(BIRKHOFF_TEST_ENVIRONMENT
  "OMPI_ALLOW_RUN_AS_ROOT=1" "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
  "OMPI_MCA_btl_vader_single_copy_mechanism=none"
  "LSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/tests/lsan.supp:print_suppressions=0"
  "TSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/tests/tsan.supp"
  "UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1")
if(BIRKHOFF_SANITIZE STREQUAL "thread")
  list(APPEND BIRKHOFF_TEST_ENVIRONMENT "OMP_NUM_THREADS=1")
endif()
# For tests that start MPI. Full stack unwinding is slower, but it identifies a leak inside Open
# MPI's plugins, which are
# unloaded by then, by its callers. The leak checker does not search the plugins' thread-local
# storage: GCC 12 guesses its
# address wrongly and sometimes crashed after a successful run. Tests may load a library before the
# sanitizer's (LD_PRELOAD).
set(BIRKHOFF_MPI_TEST_ENVIRONMENT ${BIRKHOFF_TEST_ENVIRONMENT}
  "ASAN_OPTIONS=fast_unwind_on_malloc=0:intercept_tls_get_addr=0:verify_asan_link_order=0")
