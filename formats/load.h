// SPDX-License-Identifier: Apache-2.0
// Loading from a path (lib/load/load.h says what loading is): opens the checkpoint, whatever its format.
//
//   const LoadReport report = TRY(load("/checkpoints/step-1000", options, [&](const LoadTensor& t) {
//     return Result<Destination>({engine.allocate(t.name, t.shape)});
//   }));
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "lib/checkpoint/format.h"
#include "lib/load/load.h"

namespace reshard {

// A load and the checkpoint that it reads.
struct OpenLoad {
  std::unique_ptr<Reader> reader;
  std::unique_ptr<Load> load;  // refers to the reader
};
Result<OpenLoad> open_load(const std::string& path, LoadOptions options, const OpenOptions& how = {});

// Gives memory to one tensor of this rank. It stays the caller's.
using GiveMemory = std::function<Result<Destination>(const LoadTensor& tensor)>;
// All at once: asks for the memory of each tensor in turn, then fills all of it.
Result<LoadReport> load(const std::string& path, LoadOptions options, const GiveMemory& memory);

}  // namespace reshard
