// Damaged variants of a healthy checkpoint, as disks, interrupted saves, copies and faulty writers leave them. Tests
// check that an audit finds each of them.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/layouts.h"

namespace reshard {

// A change to a checkpoint.
struct Damage {
  std::string kind;                                         // "drop a box"
  std::string what;                                         // a description for messages
  std::map<std::string, std::optional<std::string>> files;  // new contents by name; nothing: removed
  std::string undetectable;                                 // why an audit may miss it; empty if it must find it
};

// Returns about 250 damages of a DCP directory whose items are torch.save archives. Boxes, names, shapes and dtypes are
// changed in rewritten metadata; bytes of data and metadata are flipped in place. The same seed gives the same damages.
std::vector<Damage> damage_dcp(const std::string& checkpoint, std::uint32_t seed);
// Returns the metadata rewritten without a change, which must be as healthy as the original.
std::string rewritten_metadata(const std::string& checkpoint);

// Returns about 250 damages of a safetensors file; `files` of each contains its name.
std::vector<Damage> damage_safetensors(const std::string& path, std::uint32_t seed);

}  // namespace reshard
