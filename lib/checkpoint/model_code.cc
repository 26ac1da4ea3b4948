// SPDX-License-Identifier: Apache-2.0
#include "lib/checkpoint/model_code.h"

#include <array>
#include <string_view>
#include <vector>

#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr Index kMaxTextBytes = Index{16} << 20;  // of a config or a Python file

// Returns whether a directory contains a file of this name, which may come from a config.
Result<bool> has_file(const std::string& directory, std::string_view name) {
  if (!is_safe_relative_path(name)) return false;
  const auto entry = TRY(entry_at(path_join(directory, name)));
  return entry && !entry->is_directory;
}

// Returns nothing of a file that is missing or too long.
Result<std::string> text_of(const std::string& directory, std::string_view name) {
  const std::string path = path_join(directory, name);
  if (!TRY(has_file(directory, name))) return std::string();
  auto text = read_whole_file(path, kMaxTextBytes);
  if (!text && text.error().code() == ErrorCode::kCorrupt) return std::string();
  return text;
}

// Returns "modeling_own.py" for "modeling_own.OwnModel", or nothing if the reference is to another repository
// ("owner/name--modeling_own.OwnModel").
std::string file_of(std::string_view reference) {
  const std::size_t dot = reference.find('.');
  if (dot == std::string_view::npos || reference.find("--") != std::string_view::npos) return {};
  return std::string(reference.substr(0, dot)) + ".py";
}

// Adds every string in a value of auto_map: {"AutoModel": "module.Class", "AutoTokenizer": ["module.Slow", null]}
void add_references(const Json& value, std::set<std::string>& out) {
  if (const auto text = value.as_string()) out.insert(file_of(*text));
  if (const auto list = value.as_array())
    for (const Json& item : *list) add_references(item, out);
  if (const auto members = value.as_object())
    for (const Json::Member& member : *members) add_references(member.value, out);
}

// Removes the first word of `text` and the blanks after it, and returns the word.
std::string_view take_word(std::string_view& text) {
  const std::size_t end = std::min(text.find_first_of(" \t;#("), text.size());
  const std::string_view word = text.substr(0, end);
  text.remove_prefix(std::min(text.size(), text.find_first_not_of(" \t", end)));
  return word;
}

// Adds the files that a Python file imports from its own package: "from .layers import Norm", "from . import layers".
void add_imports(std::string_view code, std::set<std::string>& out) {
  for (const std::string& line : split(code, '\n')) {
    std::string_view rest = line;
    rest.remove_prefix(std::min(rest.size(), rest.find_first_not_of(" \t")));
    if (const std::string_view word = take_word(rest); word != "from" && word != "import") continue;
    std::string_view module = take_word(rest);
    if (!module.starts_with('.') || module.starts_with("..")) continue;
    module.remove_prefix(1);
    if (!module.empty()) {
      out.insert(std::string(module.substr(0, module.find('.'))) + ".py");
      continue;
    }
    take_word(rest);  // "import"
    for (const std::string& name : split(rest, ',')) {
      std::string_view one = name;
      one.remove_prefix(std::min(one.size(), one.find_first_not_of(" \t(")));
      out.insert(std::string(take_word(one)) + ".py");
    }
  }
}

Result<std::set<std::string>> named_in_configs(const std::string& directory) {
  static constexpr std::array<std::string_view, 6> kConfigs = {
      "config.json",           "tokenizer_config.json",          "preprocessor_config.json",
      "processor_config.json", "video_preprocessor_config.json", "generation_config.json"};
  std::set<std::string> out;
  for (const std::string_view name : kConfigs) {
    const auto json = parse_json(TRY(text_of(directory, name)), name);
    if (const Json* map = json ? json->find("auto_map") : nullptr) add_references(*map, out);
  }
  const auto modules = parse_json(TRY(text_of(directory, "modules.json")), "modules.json");
  if (const auto list = modules ? modules->as_array() : Result<std::span<const Json>>(modules.error()))
    for (const Json& module : *list)
      if (const Json* type = module.find("type")) add_references(*type, out);
  return out;
}

}  // namespace

Result<std::set<std::string>> model_code(const std::string& directory) {
  std::set<std::string> out, next = TRY(named_in_configs(directory));
  while (!next.empty()) {
    std::set<std::string> imported;
    for (const std::string& name : next)
      if (TRY(has_file(directory, name)) && out.insert(name).second)
        add_imports(TRY(text_of(directory, name)), imported);
    next.clear();
    for (const std::string& name : imported)
      if (!out.contains(name)) next.insert(name);
  }
  return out;
}

}  // namespace reshard
