# SPDX-License-Identifier: Apache-2.0
# Makes the files that Debian's policy requires in a package, before cpack packs it: the copyright, the packager's
# changelog, and compressed manual pages and changelogs.
file(RPATH_REMOVE FILE ${CPACK_TEMPORARY_INSTALL_DIRECTORY}/usr/bin/reshard)  # Debian's libraries are on the default path
set(docs ${CPACK_TEMPORARY_INSTALL_DIRECTORY}/usr/share/doc/reshard)
file(REMOVE ${docs}/LICENSE)
string(TIMESTAMP year "%Y" UTC)
file(WRITE ${docs}/copyright "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: reshard

Files: *
Copyright: ${year} the authors of reshard
License: Apache-2.0
 On Debian systems, the full text of the license is in /usr/share/common-licenses/Apache-2.0.
")
string(TIMESTAMP date "%a, %d %b %Y %H:%M:%S +0000" UTC)
file(WRITE ${docs}/changelog.Debian "reshard (${CPACK_PACKAGE_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE}) unstable; urgency=medium

  * Release; changelog.gz lists what changed.

 -- ${CPACK_PACKAGE_CONTACT}  ${date}
")
file(GLOB pages ${CPACK_TEMPORARY_INSTALL_DIRECTORY}/usr/share/man/man1/*.1)
execute_process(COMMAND gzip -9 -n -f ${pages} ${docs}/changelog ${docs}/changelog.Debian COMMAND_ERROR_IS_FATAL ANY)
