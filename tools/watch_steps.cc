// SPDX-License-Identifier: Apache-2.0
#include "tools/watch_steps.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <utility>

#include "formats/training_run.h"
#include "lib/base/file.h"
#include "lib/base/printable.h"
#include "lib/base/storage/storage.h"
#include "lib/base/text.h"

namespace reshard::tools {
namespace {

constexpr std::string_view kRemoved = ".reshard-removing-";

// Returns a file's name without its extension: at most 12 characters after the last dot, the first of them a letter.
std::string without_extension(const std::string& name) {
  constexpr std::size_t kLongest = 12;
  const std::size_t dot = name.rfind('.');
  const bool has_one =
      dot != std::string::npos && dot > 0 && dot + 1 < name.size() && name.size() - dot <= kLongest + 1;
  return has_one && std::isalpha(static_cast<unsigned char>(name[dot + 1])) != 0 ? name.substr(0, dot) : name;
}

// What a directory says of the steps in it.
struct Named {
  std::set<std::string> lines;    // of latest_checkpointed_iteration.txt, latest and the like
  std::set<std::string> targets;  // of links
};

Result<Named> named_in(const std::string& directory) {
  constexpr Index kLongest = 4096;
  Named out;
  for (const DirectoryEntry& entry : TRY(list_directory(directory))) {
    const std::string path = path_join(directory, entry.name);
    const auto node = TRY(node_at(path));
    if (node && node->is_link()) out.targets.insert(TRY(real_path(path)));
    const bool names_last =
        entry.name.find("latest") != std::string::npos || entry.name.find("last") != std::string::npos;
    if (entry.is_directory || entry.size > kLongest || !names_last) continue;
    const auto text = read_whole_file(path, kLongest);
    if (!text && TRY(path_exists(path))) return text.error();
    if (text) out.lines.merge(lines_of(*text));
  }
  return out;
}

}  // namespace

Result<std::vector<RunStep>> steps_of_run(const std::string& run, Index every) {
  std::vector<RunStep> out;
  std::map<std::string, std::string> sources;  // by name
  for (const std::string& source : TRY(checkpoints_of_run(run))) {
    const auto entry = TRY(entry_at(source));
    if (!entry) continue;  // removed meanwhile
    // The next save overwrites it.
    if (!entry->is_directory && is_last_of_lightning(base_name(source))) continue;
    RunStep step{source, source.substr(std::min(source.size(), run.size())), -1};
    step.name.erase(0, step.name.find_first_not_of('/'));
    if (!entry->is_directory) step.name = without_extension(step.name);
    std::replace(step.name.begin(), step.name.end(), '/', '-');
    step.number = step_in_name(step.name);
    if (step.name.empty() || step.number % every != 0 || is_removed_name(base_name(source))) continue;
    if (const auto [other, is_new] = sources.try_emplace(step.name, source); !is_new)
      return usage_error(printable(source) + ": its output would be called " + printable(step.name) + ", as that of " +
                         printable(other->second) + "; move one of them out of the run");
    out.push_back(std::move(step));
  }
  return out;
}

Result<std::set<std::string>> steps_named_by_run(const std::vector<RunStep>& complete) {
  std::map<std::string, Named> known;
  std::set<std::string> out;
  for (const RunStep& step : complete) {
    const std::string parent = parent_path(step.source);
    const auto [at, is_new] = known.try_emplace(parent);
    if (is_new) at->second = TRY(named_in(parent));
    const Named& named = at->second;
    const bool is_named = std::any_of(named.lines.begin(), named.lines.end(), [&](const std::string& line) {
      return base_name(line) == base_name(step.source) || line_means(line, step, {});
    });
    if (is_named || named.targets.contains(TRY(real_path(step.source)))) out.insert(step.source);
  }
  return out;
}

std::set<std::string> lines_of(const std::string& text) {
  constexpr std::string_view kSpaces = " \t\r";
  std::set<std::string> out;
  for (const std::string& line : split(text, '\n'))
    if (const std::size_t begin = line.find_first_not_of(kSpaces); begin != std::string::npos)
      out.insert(line.substr(begin, line.find_last_not_of(kSpaces) + 1 - begin));
  return out;
}

bool line_means(const std::string& line, const RunStep& step, const std::string& output) {
  const std::string meant = without_slashes(line);
  return meant == step.name || meant == step.source || (!output.empty() && meant == output) ||
         (step.number >= 0 && parse_number(meant).value_or(-1) == step.number);
}

std::string without_slashes(std::string path) { return is_url(path) ? path : without_end_slashes(std::move(path)); }

std::string removed_name(const std::string& path) {
  return path_join(parent_path(path), std::string(kRemoved) + base_name(path));
}

bool is_removed_name(std::string_view name) { return name.starts_with(kRemoved); }

}  // namespace reshard::tools
