// SPDX-License-Identifier: Apache-2.0
// Members of a config.json by path, with defaults for those that it leaves out, and the formulas and conditions over
// them that the table of architectures has (architecture.h).
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "lib/base/json.h"
#include "lib/layout/box.h"

namespace reshard {

// Returns the member of a config at a path such as "text_config.hidden_size" or "depths.0"; null if there is none.
const Json* member_at(const Json& config, std::string_view path);

// Not thread-safe: computed numbers are kept.
class ConfigMembers {
 public:
  // `defaults` and `computed` are objects by path, as in Architecture. All must outlive this.
  ConfigMembers(const Json& config, const Json& defaults, const Json& computed)
      : config_(config), defaults_(defaults), computed_(computed) {}

  // Returns the member, its default, or null. In "layer_types[#]" the element `number` of the list.
  const Json* find(std::string_view path, std::optional<Index> number = {}) const;
  // Returns the value of a formula, of the first of its alternatives whose members are all numbers.
  std::optional<Index> evaluate(std::string_view formula, std::optional<Index> number = {}) const;
  // Returns whether a condition holds for this number of the first {}, or nothing if a member that it needs is not
  // given.
  std::optional<bool> holds(std::string_view condition, std::optional<Index> number = {}) const;

 private:
  std::optional<Index> number_at(std::string_view path, std::optional<Index> number) const;
  std::optional<Index> computed_at(std::string_view path, std::optional<Index> number) const;
  std::optional<bool> holds_all(std::string_view terms, std::optional<Index> number) const;
  std::optional<bool> holds_term(std::string_view term, std::optional<Index> number) const;
  std::optional<bool> compares(std::string_view left, char sign, std::string_view right,
                               std::optional<Index> number) const;

  using Place = std::pair<std::string, std::optional<Index>>;  // a path, and the number of the first {}

  const Json &config_, &defaults_, &computed_;
  mutable std::map<Place, std::optional<Index>> known_;  // computed numbers; nothing while one is being computed
  mutable int depth_ = 0;                                // of computed numbers that need each other
};

}  // namespace reshard
