// SPDX-License-Identifier: Apache-2.0
// reshard families: the model families that the program knows.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "lib/base/text.h"
#include "lib/model/family_file.h"
#include "tools/commands.h"

namespace reshard::tools {
namespace {

// The options of the naming conventions that a family has: "hf", "torchtitan", ...
std::vector<std::string> conventions_of(const Family& family) {
  std::vector<std::string> out;
  for (const ConventionInfo& info : kConventions)
    if (family.has_convention(info.convention)) out.emplace_back(info.option);
  return out;
}

constexpr std::size_t kFamilyWidth = 18, kTypesWidth = 44;  // widths of columns

// Prints one family in three columns, the last two wrapped.
void print_family(const Family& family, const std::vector<std::string>& conventions) {
  const std::size_t screen = std::max(screen_width(), kFamilyWidth + 2 * kTypesWidth);
  const auto types = split(wrapped(join(family.model_types, ", "), 0, 0, kTypesWidth - 2), '\n');
  const auto names = split(wrapped(join(conventions, ", "), 0, 0, screen - kFamilyWidth - kTypesWidth), '\n');
  for (std::size_t i = 0; i < std::max(types.size(), names.size()); ++i) {
    std::string line = padded(i == 0 ? family.name : "", kFamilyWidth) + (i < types.size() ? types[i] : "");
    if (i < names.size()) line = padded(line, kFamilyWidth + kTypesWidth) + names[i];
    std::printf("%s\n", line.c_str());
  }
}

Result<int> families(bool as_json) {
  Json list = Json::array();
  const std::size_t n = builtin_families().size();
  if (!as_json)
    std::printf("%s%s%s\n", colored(padded("family", kFamilyWidth), "1").c_str(),
                colored(padded("model_type", kTypesWidth), "1").c_str(), colored("naming conventions", "1").c_str());
  for (std::size_t i = 0; i < n; ++i) {
    const Family& family = *builtin_family(i);
    const std::vector<std::string> conventions = conventions_of(family);
    if (as_json)
      list.push_back(Json::object()
                         .set("name", family.name)
                         .set("title", family.title)
                         .set("model_types", texts_json(family.model_types))
                         .set("conventions", texts_json(conventions)));
    else
      print_family(family, conventions);
  }
  if (as_json) show_json(answer_json("families").set("families", std::move(list)), 2);
  return 0;
}

}  // namespace

void add_families(CommandLine& line) {
  auto as_json = std::make_shared<bool>(false);
  line.group("Report");
  line.add_flag("--json", *as_json, "Print the families as JSON").common();
  line.examples({{"reshard families", ""}, {"reshard families --json | jq -r '.families[].name'", ""}});
  line.description(
      "--family takes these names. Without it, the family is found by the model_type of config.json or by the names of "
      "the tensors. Other transformers models are converted under their own names. --family-file adds a family "
      "(docs/adding.md).");
  line.action([as_json] { return families(*as_json); });
}

}  // namespace reshard::tools
