// SPDX-License-Identifier: Apache-2.0
#include "lib/model/class_family.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "lib/base/text.h"
#include "lib/model/architecture.h"

namespace reshard {
namespace {

Result<NameRule> rule_of(const ArchitectureParameter& p, const Architecture& architecture) {
  if (p.shape.rank() == 0) return unsupported(printable(p.name) + " is a scalar, and families describe none");
  std::vector<std::string> sizes;
  for (const Index size : p.shape) {
    if (size == kAnySize) return unsupported("no formula gives the shape of " + printable(p.name));
    sizes.push_back(std::to_string(size));
  }
  NameRule rule;
  rule.hf = (p.row->is_base && architecture.has_prefix ? architecture.prefix : "") + p.name;
  rule.shape = join(sizes, ", ");
  rule.place = NameRule::Place::kFirst;
  return rule;
}

// Lists what files of the model must have.
Result<Family> make_family(const Architecture& architecture, const ModelConfig& config) {
  const ArchitectureModel model = TRY(parameters_of(architecture, config.file));
  if (model.not_derived > 0)
    return unsupported("no formula gives the shapes of " + count_of(model.not_derived, "row") + " of " +
                       architecture.name);
  Family out;
  out.name = architecture.name;
  out.title = architecture.name + " of transformers " + architecture.transformers;
  out.model_types = {config.model_type};
  for (const ArchitectureParameter& p : model.parameters) {
    const bool is_in_files = p.row->stands_in == NameScope::kEverywhere || p.row->stands_in == NameScope::kFiles;
    if (p.is_required && is_in_files) out.rules.push_back(TRY(rule_of(p, architecture)));
  }
  if (out.rules.empty()) return unsupported("no tensor of " + architecture.name + " is known to be there");
  return out;
}

// The families that were made, by the user's own family and the text of the config.
struct FamilyCache {
  std::mutex mutex;
  std::map<std::pair<const Family*, std::string>, std::unique_ptr<Family>> families;
};
FamilyCache& made() {
  static auto* const out = new FamilyCache;
  return *out;
}

}  // namespace

Result<const Family*> class_family(const ModelConfig& config) {
  const auto architecture = find_architecture(config.model_type, config.architecture, config.families);
  if (!architecture || architecture->is_other_class || config.file.is_null()) return nullptr;
  const std::lock_guard lock(made().mutex);
  std::unique_ptr<Family>& family = made().families[{config.families.own(), to_text(config.file)}];
  if (!family) family = std::make_unique<Family>(TRY(make_family(*architecture, config).context(config.path)));
  return family.get();
}

bool is_class_family(const Family& family) {
  const std::lock_guard lock(made().mutex);
  return std::any_of(made().families.begin(), made().families.end(),
                     [&](const auto& entry) { return entry.second.get() == &family; });
}

}  // namespace reshard
