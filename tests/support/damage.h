// Checkpoints broken on purpose: from a healthy one, the variants that disks, interrupted saves, copies and wrong
// writers leave behind. For proving that an audit sees them.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/layouts.h"

namespace reshard {

// One thing done to a checkpoint.
struct Damage {
  std::string kind;                                         // "drop a box"
  std::string what;                                         // what exactly, for people
  std::map<std::string, std::optional<std::string>> files;  // new contents by name; nothing: removed
  std::string undetectable;  // why the checkpoint alone may not show it; empty: an audit has to see it
};

// Of a DCP directory whose items are torch.save archives, about 250. Boxes, names, shapes and dtypes are changed in
// metadata written anew, data and metadata are flipped in place. The same seed gives the same damages.
std::vector<Damage> damage_dcp(const std::string& checkpoint, std::uint32_t seed);
// The metadata written anew and nothing changed, which must be as healthy as they were.
std::string rewritten_metadata(const std::string& checkpoint);

// Of one safetensors file, about 250; `files` of each has its name.
std::vector<Damage> damage_safetensors(const std::string& path, std::uint32_t seed);

}  // namespace reshard
