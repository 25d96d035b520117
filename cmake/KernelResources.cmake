# The multiprocessor resources of each kernel, as the assembler reports them. Included by
# tests/CMakeLists.txt it adds
#   target kernel_resources   writes docs/benchmarks/kernel_resources.md
#   test   kernel_spills      (label build) fails if a kernel spills registers to memory, or unrolls
# a loop by a number that is no
#                             power of two: nvcc 13.0 loses the last iterations of some loops
# unrolled by 3; needs nvcc, no GPU
# Both run this file as a script, for each kernel source and architecture:
#   cmake -DNVCC=... -DSOURCES="a.cu|b.cu" -DFLAGS="...|..." -DROOT=... [-DREPORT=file.md] -P
# KernelResources.cmake

if(NOT CMAKE_SCRIPT_MODE_FILE)
  get_property(_sources GLOBAL PROPERTY BIRKHOFF_KERNEL_SOURCES)
  list(JOIN _sources "|" _sources)
  list(JOIN BIRKHOFF_KERNEL_FLAGS "|" _flags)
  set(_command ${CMAKE_COMMAND} -DNVCC=${CMAKE_CUDA_COMPILER} "-DSOURCES=${_sources}"
    "-DFLAGS=${_flags}"
    -DROOT=${CMAKE_SOURCE_DIR})
  add_custom_target(kernel_resources
    COMMAND ${_command} -DREPORT=${CMAKE_SOURCE_DIR}/docs/benchmarks/kernel_resources.md -P
      ${CMAKE_CURRENT_LIST_FILE}
    COMMENT "Reading kernel resources from the assembler" VERBATIM)
  add_test(NAME kernel_spills COMMAND ${_command} -P ${CMAKE_CURRENT_LIST_FILE})
  set_tests_properties(kernel_spills PROPERTIES LABELS build TIMEOUT 1500)
  return()
endif()

# As birkhoff_kernels compiles them, but one architecture at a time and only to machine code.
string(REPLACE "|" ";" SOURCES "${SOURCES}")
string(REPLACE "|" ";" FLAGS "${FLAGS}")
list(FILTER FLAGS EXCLUDE REGEX "gencode|arch=")
set(rows "")
set(spilling "")
set(num_kernels 0)
foreach(source IN LISTS SOURCES)
  file(RELATIVE_PATH source_name ${ROOT} ${source})
  foreach(architecture sm_80 sm_90a)
    execute_process(
      COMMAND ${NVCC} -std=c++20 ${FLAGS} -I${ROOT} -arch=${architecture} -Xptxas -v -cubin -o
        /dev/null ${source}
      OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE result)
    if(NOT result EQUAL 0)
      message(FATAL_ERROR "${output}")
    endif()
    # The lines of a kernel: its mangled name, its spills, its resources.
    string(REPLACE ";" "," output "${output}")
    string(REPLACE "\n" ";" lines "${output}")
    set(kernel "")
    foreach(line IN LISTS lines)
      if(line MATCHES "Compiling entry function '([^']+)'")
        set(kernel ${CMAKE_MATCH_1})
      elseif(kernel AND line MATCHES "Function properties for (.*)" AND NOT CMAKE_MATCH_1 STREQUAL
        kernel)
        set(kernel "")  # a function that a kernel calls: already counted in the kernel
      elseif(kernel AND line MATCHES
        "([0-9]+) bytes stack frame, ([0-9]+) bytes spill stores, ([0-9]+) bytes spill loads")
        set(stack ${CMAKE_MATCH_1})
        math(EXPR spilled "${CMAKE_MATCH_2} + ${CMAKE_MATCH_3}")
      elseif(kernel AND line MATCHES "Used ([0-9]+) registers")
        set(registers ${CMAKE_MATCH_1})
        set(shared 0)
        if(line MATCHES "([0-9]+) bytes smem")
          set(shared ${CMAKE_MATCH_1})
        endif()
        execute_process(COMMAND c++filt ${kernel} OUTPUT_VARIABLE name
          OUTPUT_STRIP_TRAILING_WHITESPACE)
        string(REGEX REPLACE "\\(anonymous namespace\\)::|birkhoff::|^void " "" name "${name}")
        string(REGEX REPLACE "\\(ReduceOp\\)" "ReduceOp " name "${name}")
        string(REGEX REPLACE "\\(.*$" "" name "${name}")  # its parameters
        set(row "| `${source_name}` | `${name}` | ${architecture} | ${registers} | ${spilled} |")
        list(APPEND rows "${row} ${stack} | ${shared} |")
        math(EXPR num_kernels "${num_kernels} + 1")
        if(spilled GREATER 0 OR stack GREATER 0)
          set(bytes "${spilled} bytes of spilled registers, ${stack} bytes of stack")
          list(APPEND spilling "${name} on ${architecture}: ${bytes}")
        endif()
      endif()
    endforeach()
  endforeach()
endforeach()

file(GLOB_RECURSE code ${ROOT}/attention/*.cu* ${ROOT}/attention/*.h ${ROOT}/cluster/*.cu*
  ${ROOT}/cluster/*.h ${ROOT}/models/*.cu* ${ROOT}/runtime/*.cu*)
foreach(file IN LISTS code)
  file(STRINGS ${file} lines REGEX "(#pragma unroll |UNROLL_BY\\()[0-9]+")
  foreach(line IN LISTS lines)
    if(NOT line MATCHES "(unroll |BY\\()(1|2|4|8|16|32|64)([^0-9]|$)")
      message(SEND_ERROR "${file} unrolls a loop by a number that is no power of two: '${line}'")
    endif()
  endforeach()
endforeach()
if(num_kernels EQUAL 0)
  message(FATAL_ERROR "the assembler named no kernel: has the format of nvcc -Xptxas -v changed?")
endif()
if(REPORT)
  list(SORT rows COMPARE NATURAL)
  list(JOIN rows "\n" table)
  execute_process(COMMAND ${NVCC} --version OUTPUT_VARIABLE version)
  string(REGEX MATCH "V[0-9.]+" version "${version}")
  file(WRITE ${REPORT} "# Multiprocessor resources of the kernels

Made by `cmake --build --preset cuda --target kernel_resources` from the output of nvcc ${version}
(`-Xptxas -v`). A multiprocessor has 65,536 registers and 164 KiB (sm_80) or 228 KiB (sm_90a) of
shared memory. Spilled bytes are registers that the kernel writes to and reads from memory; the test
`kernel_spills` fails on any.

| source | kernel | architecture | registers per thread | spilled, bytes | stack, bytes | shared
  memory per block, bytes |
|---|---|---|---|---|---|---|
${table}
")
endif()
if(spilling)
  list(JOIN spilling "\n  " text)
  message(FATAL_ERROR "kernels that spill:\n  ${text}")
endif()
message(STATUS "${num_kernels} kernels, none spills")
