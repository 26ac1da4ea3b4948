// SPDX-License-Identifier: Apache-2.0
#include "formats/gguf/gguf.h"

#include <algorithm>

#include "lib/base/text.h"

namespace reshard {
namespace gguf {
namespace {

Result<bool> recognises(const PathSnapshot& place) {
  if (place.is_file()) return place.head().starts_with(kMagic) || place.name().ends_with(kEnding);
  return place.has_file_like([](std::string_view name) { return name.ends_with(kEnding); });
}

// Takes "-00002" off the end of a name, and returns the number.
std::optional<Index> take_last_number(std::string_view& name) {
  const std::size_t dash = name.rfind('-');
  const auto number = dash == std::string_view::npos ? std::nullopt : parse_number(name.substr(dash + 1));
  if (number) name = name.substr(0, dash);
  return number;
}

}  // namespace

SplitName parse_split_name(std::string_view name) {
  constexpr std::string_view kOf = "-of";
  if (name.ends_with(kEnding)) name.remove_suffix(kEnding.size());
  std::string_view rest = name;
  const auto count = take_last_number(rest);
  if (count && rest.ends_with(kOf)) {
    rest.remove_suffix(kOf.size());
    const auto number = take_last_number(rest);
    if (number && *number >= 1 && *number <= *count) return {std::string(rest), *number, *count};
  }
  return {std::string(name), 1, 1};
}

}  // namespace gguf

const Format kGgufFormat = {
    .name = "gguf",
    .title = "GGUF",
    .recognises = gguf::recognises,
    .open = gguf::open,
    .lay_out = nullptr,
    .holds = StateSupport::kModel,
    .written_by =
        "llama.cpp's converter writes it of a Hugging Face model: reshard convert SRC MODEL --to hf; "
        "python convert_hf_to_gguf.py MODEL --outfile MODEL.gguf",
};

}  // namespace reshard
