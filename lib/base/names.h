// SPDX-License-Identifier: Apache-2.0
// Shortens lists of tensor names for display: numbers become ranges, and long lists are cut.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/checked.h"

namespace reshard {

// Parses a number of up to 18 digits in canonical form: "7", but not "07", "-1" or "+7".
std::optional<Index> as_number(std::string_view text);

// Returns the runs of consecutive numbers: {0, 1, 2, 5} -> "0..2", "5".
std::vector<std::string> runs_of(const std::vector<Index>& ascending, std::string_view to = "..");

// Several names written as one: "model.layers.{0..31}.self_attn.k_proj.weight".
struct FoldedName {
  std::string text;
  std::size_t first = 0;  // index of the first of the names
};
// Replaces numeric components by ranges if all combinations of them exist. The result is in the order of the first
// names.
std::vector<FoldedName> fold(const std::vector<std::string>& names);
// Returns the texts of fold(). As patterns (glob_match()) they match exactly these names and no others of their form.
std::vector<std::string> fold_names(const std::vector<std::string>& names);

// Returns "a, b, c and 12 more".
std::string some_of(const std::vector<std::string>& texts, std::size_t shown = 3);
// Returns "'a', 'b', 'c' and 12 more", printable.
std::string some_quoted(const std::vector<std::string>& names);
// Returns "1,024 tensors: 'a', 'b', 'c' and 1,021 more".
std::string names_text(const std::vector<std::string>& names, std::string_view noun);
// Returns the folded names on one printable line, cut after `shown` texts.
std::string folded(const std::vector<std::string>& names, std::size_t shown = 3);

}  // namespace reshard
