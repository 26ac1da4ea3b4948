// SPDX-License-Identifier: Apache-2.0
// The optional parts of the program: whether they are built in, and whether this machine has the libraries they load.
#pragma once

#include <string>
#include <vector>

#include "lib/base/result.h"

namespace reshard::tools {

struct BuildPart {
  std::string name;             // "mpi"
  Result<std::string> version;  // of the library that is found: "Open MPI v4.1.4"; the error says why there is none
};

// Returns zstd, mpi, cuda, nccl, cufile, fuse and buckets, in this order.
std::vector<BuildPart> build_parts();

}  // namespace reshard::tools
