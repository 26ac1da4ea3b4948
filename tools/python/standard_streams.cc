// SPDX-License-Identifier: Apache-2.0
// The standard streams under the names that the bundled libhdf5 refers to (see CMakeLists.txt).
#include <cstdio>

extern "C" {
FILE* reshard_stderr = stderr;
FILE* reshard_stdout = stdout;
}
