// SPDX-License-Identifier: Apache-2.0
// Words that people type, compared with those that are known.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace reshard {

// Returns "; did you mean --max-shard-size?" if a known word resembles `word` or begins with it; else nothing.
std::string near_name(std::string_view word, const std::vector<std::string>& known);

// Returns what a message about an unknown word ends with: "; choose one of: bfloat16, float16", after the one that was
// probably meant.
std::string choices_text(std::string_view word, const std::vector<std::string>& choices);

}  // namespace reshard
