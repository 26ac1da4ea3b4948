// SPDX-License-Identifier: Apache-2.0
// A key of PEFT's rank_pattern or alpha_pattern. It matches the modules that Python's re.match(rf"(.*\.)?({key})$")
// finds (peft/utils/other.py, get_pattern_key). Most keys are names: "q_proj", "model.layers.0.self_attn.q_proj".
#pragma once

#include <string_view>
#include <vector>

#include "lib/base/result.h"

namespace reshard {

class ModulePattern {
 public:
  // Parses a key. Fails (unsupported) if it uses more of regular expressions than characters, ".", "\d", escaped
  // characters, each optionally followed by "*", "+" or "?", and "^" at the beginning.
  static Result<ModulePattern> parse(std::string_view key);

  bool matches(std::string_view module) const;

 private:
  struct Step {
    enum class Takes { kThis, kAny, kDigit } takes = Takes::kThis;
    char character = 0;
    bool is_optional = false, repeats = false;

    bool take(char c) const;
  };

  std::vector<Step> steps_;
  bool is_whole_ = false;  // begins with "^", so nothing may precede it
};

}  // namespace reshard
