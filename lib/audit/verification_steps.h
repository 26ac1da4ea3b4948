// SPDX-License-Identifier: Apache-2.0
// Shared by the steps of verify(). Internal.
#pragma once

#include <cstddef>
#include <functional>
#include <set>
#include <string>

#include "lib/audit/verification.h"

namespace reshard {

struct OpenedSource {
  OpenCheckpoint checkpoint;
  std::string refusal;  // why the reader refused it, if it was opened without validation

  Reader& reader() const { return *checkpoint.reader; }
  const Catalog& catalog() const { return checkpoint.reader->catalog(); }
};

// Whether data is present, and whether it can be read as the metadata says.
struct Structure {
  bool metadata_only = false;
  bool is_readable = true;           // all of it
  std::set<std::size_t> unreadable;  // tensors that cannot be read
};

// Returns the function to call with the number of bytes read; null if nobody watches.
std::function<void(Index)> watch(const VerifyOptions& options, Index bytes);

// Describes how many checksums matched. `where`: "the format records".
std::string checksums_text(Index count, const char* where);

// Reads the requested data: checksums, digests against the manifest, values, copies.
Status check_bytes(const OpenedSource& opened, const Model& model, const Structure& structure,
                   const VerifyOptions& options, VerifyReport& report);

}  // namespace reshard
