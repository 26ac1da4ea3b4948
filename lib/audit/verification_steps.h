// What the steps of verify() have in common. Not for others.
#pragma once

#include <functional>
#include <string>

#include "lib/audit/verification.h"

namespace reshard {

struct Opened {
  OpenCheckpoint checkpoint;
  std::string refusal;  // why the reader would not have it, where it was opened all the same

  Reader& reader() const { return *checkpoint.reader; }
  const Catalog& catalog() const { return checkpoint.reader->catalog(); }
};

// Whether there are data, and whether they can be read as the metadata say.
struct Structure {
  bool metadata_only = false;
  bool is_readable = true;
};

// What is told how many bytes were read; null where nobody watches.
std::function<void(Index)> watch(const VerifyOptions& options, Index bytes);

// How many checksums held, for people. `where`: "the format records".
std::string checksums_text(Index count, const char* where);

// Reads the data that were asked for: checksums, digests against the manifest, values, copies.
Status check_bytes(const Opened& opened, const Model& model, const Structure& structure, const VerifyOptions& options,
                   VerifyReport& report);

}  // namespace reshard
