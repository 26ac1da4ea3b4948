// SPDX-License-Identifier: Apache-2.0
// Words that people type, compared with those that are known.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace reshard {

// Returns "; did you mean step-1000?", or nothing for an empty name.
std::string meant_text(std::string_view name);

// Returns "; did you mean --max-shard-size?" if a known word resembles `word` or begins with it; else nothing.
std::string near_name(std::string_view word, const std::vector<std::string>& known);

// Returns the end of a message about an unknown word: the choice that was probably meant, if any, then all choices:
// "; did you mean bfloat16? Choose one of: bfloat16, float16". `others` are words that are accepted too: "bf16".
std::string choices_text(std::string_view word, const std::vector<std::string>& choices,
                         const std::vector<std::string>& others = {});

// Returns the existing path that was probably meant by one that leads to nothing: "runs/step-1000" for "runs/step-100"
// or "rums/step-1000". Empty if nothing is near, if the path exists, and for URLs. Lists the directory above.
std::string near_path(const std::string& path);

}  // namespace reshard
