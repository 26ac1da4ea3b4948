# SPDX-License-Identifier: Apache-2.0
# Writes `file`: the licenses of libraries that are part of a binary, which must be distributed with it. Every binary
# contains those whose templates it uses; the arguments after `file` are Debian's and Ubuntu's packages of the others.
# What is not installed as such a package is left out.
function(collect_licenses file)
  set(text "This binary contains code of the following projects, each under its own license.\n")
  foreach(package nlohmann-json3-dev libcli11-dev ${ARGN})
    if(EXISTS /usr/share/doc/${package}/copyright)
      file(READ /usr/share/doc/${package}/copyright license)
      string(APPEND text "\n==== ${package} ====\n\n${license}")
    endif()
  endforeach()
  file(WRITE ${file} "${text}")
endfunction()
