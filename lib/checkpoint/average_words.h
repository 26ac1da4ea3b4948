// SPDX-License-Identifier: Apache-2.0
// Words in names that suggest an average of a model's weights.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace reshard {

// Splits a name or key at '.', '_', '-' and changes of case, in lower case: "emaModel", "EMA_model" and "EMAModel" are
// "ema" and "model".
std::vector<std::string> words_in_name(std::string_view name);

// "shadow", "avg", "G_ema", ...: a model under it is an average of one, but other modules have such names as well.
// Words that are clear are is_average_word()'s (state_key.h).
bool hints_at_average(std::string_view word);

}  // namespace reshard
