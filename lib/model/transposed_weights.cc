// SPDX-License-Identifier: Apache-2.0
#include "lib/model/transposed_weights.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/model/family_file.h"

namespace reshard {
namespace {

using TransposedTable = std::map<std::string, std::vector<std::string>, std::less<>>;  // globs of a model type

Result<TransposedTable> parse_transposed(std::string_view text) {
  const Json json = TRY(parse_json(text, "transposed.json"));
  TransposedTable out;
  for (const Json& group : TRY(json.get_array("transposed")))
    for (const Json& type : TRY(group.get_array("model_types"))) {
      std::vector<std::string>& globs = out[std::string(TRY(type.as_string()))];
      for (const Json& glob : TRY(group.get_array("weights"))) globs.emplace_back(TRY(glob.as_string()));
    }
  return out;
}

const TransposedTable& transposed_table() {
  static const TransposedTable made = [] {
    auto parsed = parse_transposed(builtin_transposed());
    if (parsed) return *std::move(parsed);
    std::fprintf(stderr, "%s\n", parsed.error().message().c_str());  // tests parse the built-in table
    std::abort();
  }();
  return made;
}

}  // namespace

bool is_stored_transposed(const Family* family, const ModelConfig* config, std::string_view parameter) {
  const auto transposes = [&](std::string_view model_type) {
    const auto found = transposed_table().find(model_type);
    return found != transposed_table().end() && any_glob_matches(found->second, parameter);
  };
  if (config)
    return transposes(config->model_type) || transposes(config->text_model_type) ||
           std::any_of(config->parts.begin(), config->parts.end(),
                       [&](const ModelConfig& part) { return transposes(part.model_type); });
  return family && std::any_of(family->model_types.begin(), family->model_types.end(), transposes);
}

bool may_be_stored_transposed(std::string_view parameter) {
  return std::any_of(transposed_table().begin(), transposed_table().end(),
                     [&](const auto& row) { return any_glob_matches(row.second, parameter); });
}

}  // namespace reshard
