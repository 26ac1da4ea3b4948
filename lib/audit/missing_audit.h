// What a config describes held against what is there: parameters that no tensor is, and tensors that are none of the
// config's.
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

// What the config describes, beside what there is.
struct DescribedModel {
  const Catalog& catalog;
  const Family& family;
  const ModelConfig& config;
  Convention names = Convention::kHf;
  std::vector<Parameter> expected;  // what must be there, then what the config allows
  std::size_t required = 0;         // how many of them must be there
  std::unordered_map<std::string, const Parameter*> by_name;

  bool requires_it(const Parameter& p) const { return static_cast<std::size_t>(&p - expected.data()) < required; }
  DType dtype() const { return dtype_from_torch(config.dtype).value_or(DType::kBFloat16); }
  Index bytes(const Parameter& p) const { return volume(p.shape) * byte_size(dtype()); }
};

// The checkpoint's model tensors by the parameters they are.
struct StoredModel {
  std::unordered_map<std::string, const Tensor*> found;  // by canonical name
  std::set<std::string> packed;                          // canonical names that a fused projection holds
  std::vector<std::pair<ParsedName, const Tensor*>> extra;
  std::vector<const Tensor*> unknown;                     // whose names the family does not know
  std::map<std::string, std::set<std::size_t>> sections;  // of parameters that are stored in some, which are there
  std::string other_head;                                 // "value_head", "score"

  const Tensor* find(const Parameter& p) const {
    const auto it = found.find(p.name);
    return it == found.end() ? nullptr : it->second;
  }
};

// The head, whole layers, experts and others that are missing; tensors of layers or parameters that the model has not;
// and names that the family does not know. Where these hold what is missing, that is one finding. `experts_kept`: of
// experts that were joined, those numbered from this one on are in the others; 0: none were.
void audit_missing(const DescribedModel& subject, const StoredModel& stored, Index experts_kept, FindingList& findings);

inline constexpr std::size_t kShownKinds = 6;             // lines, one for each parameter of the table
std::string leaf_of_rule(std::string_view pattern);       // "q_proj"
std::string ranges_text(const std::set<Index>& numbers);  // "0 to 3, 7"

}  // namespace reshard
