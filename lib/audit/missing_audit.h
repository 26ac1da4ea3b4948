// SPDX-License-Identifier: Apache-2.0
// Compares a config's parameters with the stored tensors: parameters that are missing, and tensors that are not in the
// config.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/checkpoint/catalog.h"
#include "lib/model/parameters.h"

namespace reshard {

// The model that the config describes, for the checkpoint in `catalog`.
struct DescribedModel {
  const Catalog& catalog;
  const Family& family;
  const ModelConfig& config;
  Convention names = Convention::kHf;
  std::vector<Parameter> expected;  // required ones first, then those that the config allows
  std::size_t required = 0;         // number of required ones
  std::unordered_map<std::string, const Parameter*> by_name;

  bool requires_it(const Parameter& p) const { return static_cast<std::size_t>(&p - expected.data()) < required; }
  DType dtype() const { return dtype_from_torch(config.dtype).value_or(DType::kBFloat16); }
  Index bytes(const Parameter& p) const { return volume(p.shape) * byte_size(dtype()); }
};

// The checkpoint's model tensors by parameter.
struct StoredModel {
  std::unordered_map<std::string, const Tensor*> found;  // keyed by canonical name
  std::set<std::string> packed;                          // canonical names inside fused projections
  std::vector<std::pair<ParsedName, const Tensor*>> extra;
  std::vector<const Tensor*> unknown;  // with names that the family does not know
  std::map<std::string, std::set<std::size_t>>
      sections;            // for parameters stored in sections: the sections that are present
  std::string other_head;  // "value_head", "score"

  const Tensor* find(const Parameter& p) const {
    const auto it = found.find(p.name);
    return it == found.end() ? nullptr : it->second;
  }
};

// Finds missing heads, layers, experts and other parameters, tensors of layers or parameters that the model lacks, and
// names that the family does not know. If such tensors contain what is missing, that is a single finding.
// `experts_kept`: if several experts were joined into one, how many are stored; the others are inside them. 0: none
// were.
void audit_missing(const DescribedModel& subject, const StoredModel& stored, Index experts_kept, FindingList& findings);

inline constexpr std::size_t kShownKinds = 6;             // lines, one per parameter of the table
std::string leaf_of_rule(std::string_view pattern);       // "q_proj"
std::string ranges_text(const std::set<Index>& numbers);  // "0 to 3, 7"

}  // namespace reshard
