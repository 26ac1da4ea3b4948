// Names of tensors as people read them: the numbers in them as ranges, and long lists cut short.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/checked.h"

namespace reshard {

// A number of up to 18 digits that stands for itself: "7", but neither "07" nor "-1" nor "+7".
std::optional<Index> as_number(std::string_view text);

// The runs of ascending numbers: {0, 1, 2, 5} -> "0..2", "5".
std::vector<std::string> runs_of(const std::vector<Index>& ascending, std::string_view to = "..");

// Several names as one: "model.layers.{0..31}.self_attn.k_proj.weight".
struct FoldedName {
  std::string text;
  std::size_t first = 0;  // of the names that it stands for: an index
};
// Components that are numbers become ranges where every combination of them is there. In the order of the first names.
std::vector<FoldedName> fold(const std::vector<std::string>& names);
// Their texts: patterns (glob_match) that match these names and no others of their kind.
std::vector<std::string> fold_names(const std::vector<std::string>& names);

// "a, b, c and 12 more".
std::string some_of(const std::vector<std::string>& texts, std::size_t shown = 3);
// The names folded and printable, in one line: some of them where they do not fold.
std::string folded(const std::vector<std::string>& names, std::size_t shown = 3);

}  // namespace reshard
