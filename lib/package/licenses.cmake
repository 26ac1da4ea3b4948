# SPDX-License-Identifier: Apache-2.0
# Writes `file`: the licenses of libraries that are part of a binary, which must be distributed with it. They are taken
# from Debian's or Ubuntu's `packages` of them; elsewhere, and for a package that is not installed, they are left out.
function(collect_licenses file)
  set(text "This binary contains code of the following projects, each under its own license.\n")
  foreach(package ${ARGN})
    if(EXISTS /usr/share/doc/${package}/copyright)
      file(READ /usr/share/doc/${package}/copyright license)
      string(APPEND text "\n==== ${package} ====\n\n${license}")
    endif()
  endforeach()
  file(WRITE ${file} "${text}")
endfunction()
