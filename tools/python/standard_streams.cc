// SPDX-License-Identifier: Apache-2.0
// The streams that a libhdf5 compiled for programs refers to (CMakeLists.txt).
#include <cstdio>

extern "C" {
FILE* reshard_stderr = stderr;
FILE* reshard_stdout = stdout;
}
