# SPDX-License-Identifier: Apache-2.0
# The files that `cmake --install` puts below its prefix: the program, the library with its headers, and the package for
# find_package(reshard). None of them contains paths of the source or build tree.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
include(${CMAKE_CURRENT_LIST_DIR}/licenses.cmake)

set(RESHARD_INCLUDE_DIR ${CMAKE_INSTALL_INCLUDEDIR}/reshard)
set(RESHARD_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/reshard)

# Finds libraries outside the loader's default directories (MPI or HDF5 of a cluster's modules).
# The final path is set at build time. If CMake replaced it at install time, it would pad it with colons, and an empty
# entry means the current directory, from which any library could be loaded.
set_target_properties(reshard PROPERTIES INSTALL_RPATH_USE_LINK_PATH TRUE BUILD_WITH_INSTALL_RPATH TRUE)
set_target_properties(reshard_core PROPERTIES EXPORT_NAME core)
# Headers keep their relative paths, so they are included as in this tree.
target_include_directories(reshard_core INTERFACE $<INSTALL_INTERFACE:${RESHARD_INCLUDE_DIR}>)

install(TARGETS reshard COMPONENT program)
install(TARGETS reshard_core EXPORT reshard-targets)
install(DIRECTORY lib formats DESTINATION ${RESHARD_INCLUDE_DIR} FILES_MATCHING PATTERN "*.h"
        PATTERN package EXCLUDE)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(FILES CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR} RENAME changelog)
if(BUILD_HDF5_ARCHIVE)
  set(linked_in libhdf5-dev libaec-dev)
endif()
collect_licenses(${PROJECT_BINARY_DIR}/licenses ${linked_in})
install(FILES ${PROJECT_BINARY_DIR}/licenses DESTINATION ${CMAKE_INSTALL_DOCDIR})
# Manual pages and shell completions, which the program prints.
set(RESHARD_PAGES ${PROJECT_BINARY_DIR}/share)
add_custom_command(
  TARGET reshard POST_BUILD
  COMMAND ${CMAKE_COMMAND} -E make_directory ${RESHARD_PAGES}/man
  COMMAND reshard man --all ${RESHARD_PAGES}/man
  COMMAND reshard completions bash > ${RESHARD_PAGES}/reshard
  COMMAND reshard completions zsh > ${RESHARD_PAGES}/_reshard
  COMMAND reshard completions fish > ${RESHARD_PAGES}/reshard.fish
  VERBATIM)
install(DIRECTORY ${RESHARD_PAGES}/man/ DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT program)
install(FILES ${RESHARD_PAGES}/reshard DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions COMPONENT program)
install(FILES ${RESHARD_PAGES}/_reshard DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions COMPONENT program)
install(FILES ${RESHARD_PAGES}/reshard.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d COMPONENT program)
install(EXPORT reshard-targets NAMESPACE reshard:: DESTINATION ${RESHARD_PACKAGE_DIR})

configure_package_config_file(lib/package/reshard-config.cmake.in ${PROJECT_BINARY_DIR}/reshard-config.cmake
                              INSTALL_DESTINATION ${RESHARD_PACKAGE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/reshard-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/reshard-config.cmake ${PROJECT_BINARY_DIR}/reshard-config-version.cmake
        DESTINATION ${RESHARD_PACKAGE_DIR})

# A Debian package with the same files: cpack --config build/release/CPackConfig.cmake
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME reshard)
set(CPACK_PACKAGE_CONTACT "the authors of reshard <reshard@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Convert, inspect and audit training checkpoints")
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION
    "Converts the shards of distributed training to Hugging Face models or to\nother parallel degrees and frameworks, optimizer included. Inspects and\naudits what was saved, and proves its output.")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "openmpi-bin, libfuse3-3, fuse3, libcurl4")  # opened at run time for ranks, mounts and URLs
set(CPACK_PRE_BUILD_SCRIPTS ${PROJECT_SOURCE_DIR}/lib/package/debian.cmake)
include(CPack)
