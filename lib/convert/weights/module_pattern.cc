// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/weights/module_pattern.h"

#include <cctype>
#include <string>

#include "lib/base/text.h"

namespace reshard {

bool ModulePattern::Step::take(char c) const {
  if (takes == Takes::kThis) return c == character;
  return takes == Takes::kAny || (c >= '0' && c <= '9');
}

Result<ModulePattern> ModulePattern::parse(std::string_view key) {
  const Error refused = unsupported("'" + printable(key) +
                                    "': unsupported regular expression; expected a name, optionally with '.', '\\d', "
                                    "'*', '+', '?' and a leading '^'");
  ModulePattern out;
  out.is_whole_ = key.starts_with('^');
  for (std::size_t i = out.is_whole_ ? 1 : 0; i < key.size(); ++i) {
    Step step;
    step.character = key[i];
    if (key[i] == '.') {
      step.takes = Step::Takes::kAny;
    } else if (key[i] == '\\') {
      if (++i == key.size()) return refused;
      step.character = key[i];
      if (key[i] == 'd')
        step.takes = Step::Takes::kDigit;
      else if (std::isalnum(static_cast<unsigned char>(key[i])) != 0)
        return refused;  // "\w", "\1"
    } else if (std::string_view("*+?()[]{}|^$").find(key[i]) != std::string_view::npos) {
      return refused;
    }
    const char how_often = i + 1 < key.size() ? key[i + 1] : '\0';
    if (how_often == '*' || how_often == '+' || how_often == '?') {
      step.is_optional = how_often != '+';
      step.repeats = how_often != '?';
      ++i;
    }
    out.steps_.push_back(step);
  }
  return out;
}

bool ModulePattern::matches(std::string_view module) const {
  std::vector<bool> reached(module.size() + 1);  // the prefixes of the module that the steps so far can match
  reached[0] = true;
  for (std::size_t i = 0; i < module.size() && !is_whole_; ++i) reached[i + 1] = module[i] == '.';
  for (const Step& step : steps_) {
    std::vector<bool> next(reached.size());
    if (step.is_optional) next = reached;
    for (std::size_t i = 0; i < module.size(); ++i)
      if ((reached[i] || (step.repeats && next[i])) && step.take(module[i])) next[i + 1] = true;
    reached = std::move(next);
  }
  return reached.back();
}

}  // namespace reshard
