# cmake --install BUILD --prefix FOLDER (docs/install.md). The folder can be moved: programs and
# libraries find each other by
# $ORIGIN, the CMake package and the module files by their own place. Only LibTorch's place is
# fixed: that of the build, which
# birkhoff_torch links with.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS birkhoff RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS birkhoff_ops LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
set_target_properties(birkhoff PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
set_target_properties(birkhoff_ops PROPERTIES INSTALL_RPATH "$ORIGIN")
if(TARGET birkhoff_gpu_kernels)
  install(TARGETS birkhoff_gpu_kernels LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  set_target_properties(birkhoff_gpu_kernels PROPERTIES INSTALL_RPATH "$ORIGIN")
endif()

# For other projects: find_package(Birkhoff) and Python's import birkhoff_ops.
set(_package ${CMAKE_INSTALL_LIBDIR}/cmake/Birkhoff)
set(_library
  ${CMAKE_INSTALL_LIBDIR}/${CMAKE_SHARED_LIBRARY_PREFIX}birkhoff_ops${CMAKE_SHARED_LIBRARY_SUFFIX})
file(STRINGS ${BIRKHOFF_TORCH}/include/torch/headeronly/version.h _torch REGEX
  "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
list(TRANSFORM _torch REPLACE "#define TORCH_VERSION_[A-Z]+ " "")
list(JOIN _torch "." BIRKHOFF_TORCH_VERSION)
configure_package_config_file(${CMAKE_SOURCE_DIR}/cmake/site/BirkhoffConfig.cmake.in
  ${CMAKE_BINARY_DIR}/install/BirkhoffConfig.cmake
  INSTALL_DESTINATION ${_package} PATH_VARS _library NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/install/BirkhoffConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/install/BirkhoffConfig.cmake
  ${CMAKE_BINARY_DIR}/install/BirkhoffConfigVersion.cmake
  DESTINATION ${_package})
configure_file(${CMAKE_SOURCE_DIR}/cmake/site/birkhoff_ops.py.in
  ${CMAKE_BINARY_DIR}/install/birkhoff_ops.py @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/install/birkhoff_ops.py DESTINATION
  ${CMAKE_INSTALL_LIBDIR}/python)

# Experiments, documents, and module files for Lmod and for Tcl modules.
install(DIRECTORY ${CMAKE_SOURCE_DIR}/configs/ DESTINATION
  ${CMAKE_INSTALL_DATADIR}/birkhoff/configs FILES_MATCHING PATTERN "*.txtpb"
  PATTERN loader EXCLUDE PATTERN schema EXCLUDE)
install(FILES ${CMAKE_SOURCE_DIR}/README.md ${CMAKE_SOURCE_DIR}/CHANGELOG.md
  ${CMAKE_SOURCE_DIR}/CONTRIBUTING.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY ${CMAKE_SOURCE_DIR}/docs DESTINATION ${CMAKE_INSTALL_DOCDIR})
configure_file(${CMAKE_SOURCE_DIR}/cmake/site/module.lua.in ${CMAKE_BINARY_DIR}/install/module.lua
  @ONLY)
configure_file(${CMAKE_SOURCE_DIR}/cmake/site/module.tcl.in ${CMAKE_BINARY_DIR}/install/module.tcl
  @ONLY)
set(_modules ${CMAKE_INSTALL_DATADIR}/birkhoff/modulefiles/birkhoff)
install(FILES ${CMAKE_BINARY_DIR}/install/module.lua DESTINATION ${_modules} RENAME
  ${PROJECT_VERSION}.lua)
install(FILES ${CMAKE_BINARY_DIR}/install/module.tcl DESTINATION ${_modules} RENAME
  ${PROJECT_VERSION})
