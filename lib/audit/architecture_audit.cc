// SPDX-License-Identifier: Apache-2.0
#include "lib/audit/architecture_audit.h"

#include <algorithm>
#include <map>
#include <unordered_map>

#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/model/architecture.h"
#include "lib/model/config_members.h"
#include "lib/model/formula.h"

namespace reshard {
namespace {

// Returns whether a formula uses one of these fields.
bool uses(const std::string& formula, const std::set<std::string>& fields) {
  std::string name;
  for (const char c : formula + ";") {
    if (std::string_view("+-*/:^;").find(c) == std::string_view::npos) {
      name += c;
      continue;
    }
    if (fields.contains(name)) return true;
    name.clear();
  }
  return false;
}

bool uses_any(const std::vector<std::string>& formulas, const std::set<std::string>& fields) {
  return std::any_of(formulas.begin(), formulas.end(), [&](const std::string& f) { return uses(f, fields); });
}

// Returns the current name of a parameter that transformers also reads under an old name: TensorFlow's LayerNorm,
// weight norm.
std::string current_name(std::string name) {
  static constexpr std::pair<std::string_view, std::string_view> kOld[] = {
      {".gamma", ".weight"},
      {".beta", ".bias"},
      {".weight_g", ".parametrizations.weight.original0"},
      {".weight_v", ".parametrizations.weight.original1"}};
  for (const auto& [old, current] : kOld)
    if (name.ends_with(old)) return name.substr(0, name.size() - old.size()) + std::string(current);
  return name;
}

struct WrongShape {
  const ArchitectureParameter* parameter = nullptr;
  const Tensor* tensor = nullptr;
};

class ArchitectureComparison {
 public:
  ArchitectureComparison(const Architecture& architecture, const ArchitectureModel& model,
                         const std::vector<NamedTensor>& tensors, const std::set<std::string>& others,
                         const ModelConfig& config, const std::set<std::string>& contradicted)
      : architecture_(architecture), model_(model), config_(config), contradicted_(contradicted) {
    const bool has_prefix = std::any_of(tensors.begin(), tensors.end(), [&](const NamedTensor& t) {
      return !architecture.prefix.empty() && t.name.starts_with(architecture.prefix);
    });
    prefix_ = has_prefix ? architecture.prefix : "";
    const std::string added = added_base(tensors);
    const auto own_name = [&](const std::string& name) {
      return current_name(name.starts_with(added) ? name.substr(added.size()) : name);
    };
    for (const NamedTensor& t : tensors) stored_.emplace(own_name(t.name), t.tensor);
    for (const std::string& name : others) others_.insert(own_name(name));
    is_in_memory_ = count_of_names(NameScope::kMemory) > count_of_names(NameScope::kFiles);
  }

  ArchitectureAudit audit() {
    for (const ArchitectureParameter& p : model_.parameters) {
      const auto found = stored_.find(name_of(p));
      if (found != stored_.end())
        compare(p, *found->second);
      else if (is_required(p) && !others_.contains(name_of(p)) && !uses_any(p.row->counts, contradicted_))
        missing_.push_back(&p);
    }
    if (known_.empty()) {
      out_.skipped =
          "no tensor has a name of " + printable(architecture_.name) + " of transformers " + architecture_.transformers;
      return std::move(out_);
    }
    out_.unknown = std::ssize(stored_) - std::ssize(known_);
    report_shapes();
    report_missing();
    out_.compared = printable(architecture_.name) + " of transformers " + architecture_.transformers + ", " +
                    count_of(std::ssize(known_), "tensor") + ", " + count_of(elements_, "parameter");
    return std::move(out_);
  }

 private:
  // Returns the first part of the names, "gpt_neox.", if all tensors have it and no parameter of the class does. Names
  // that are those of a family without its base have got that base (lib/model/parts.h).
  std::string added_base(const std::vector<NamedTensor>& tensors) const {
    if (tensors.empty()) return "";
    const std::string first = tensors[0].name.substr(0, tensors[0].name.find('.') + 1);
    const bool is_own = std::any_of(model_.parameters.begin(), model_.parameters.end(),
                                    [&](const ArchitectureParameter& p) { return name_of(p).starts_with(first); });
    const bool have_all =
        std::all_of(tensors.begin(), tensors.end(), [&](const NamedTensor& t) { return t.name.starts_with(first); });
    return have_all && !is_own ? first : "";
  }

  std::string name_of(const ArchitectureParameter& p) const { return (p.row->is_base ? prefix_ : "") + p.name; }

  std::ptrdiff_t count_of_names(NameScope place) const {
    return std::count_if(model_.parameters.begin(), model_.parameters.end(), [&](const ArchitectureParameter& p) {
      return p.row->stands_in == place && stored_.contains(name_of(p));
    });
  }
  // Returns whether the parameter is stored, or has a name of the other kind: only in files, or only in memory.
  bool is_there(const ArchitectureParameter& p) const {
    return p.row->stands_in != (is_in_memory_ ? NameScope::kFiles : NameScope::kMemory);
  }
  bool is_required(const ArchitectureParameter& p) const {
    return p.is_required && p.row->stands_in != NameScope::kMemoryTied && is_there(p);
  }

  void compare(const ArchitectureParameter& p, const Tensor& t) {
    if (!is_there(p)) return;
    if (known_.insert(&t).second) elements_ += t.elements();
    if (p.fits(t.shape)) {
      if (p.shape == t.shape) out_.proven.insert(&t);
      return;
    }
    for (int d = 0; d < p.shape.rank(); ++d)
      if (uses(p.row->dims[d], contradicted_)) return;
    wrong_shapes_[p.row].push_back({&p, &t});
  }

  void report_shapes() {
    for (const auto& [row, list] : wrong_shapes_) {
      std::map<Dims, std::vector<WrongShape>> by_shape;
      for (const WrongShape& m : list) by_shape[m.tensor->shape].push_back(m);
      for (const auto& [shape, same] : by_shape) report_shape(same);
    }
  }

  void report_shape(const std::vector<WrongShape>& list) {
    const Dims &got = list[0].tensor->shape, &want = list[0].parameter->shape;
    Finding f{Severity::kError, "shape-other", {}, {}, {}, "", ""};
    for (const WrongShape& m : list) f.tensors.push_back(m.tensor->name);
    f.what = to_string(got) + "; " + config_.path + " expects " + text_of(want);
    if (want.rank() == 2 && got.rank() == 2 && list[0].parameter->fits({got[1], got[0]})) {
      f.id = "shape-transposed";
      f.why.push_back("the two dimensions are exchanged");
      f.advice = "No data is lost; transpose it.";
    } else {
      explain(*list[0].parameter, got, f);
    }
    out_.findings.push_back(std::move(f));
  }

  static std::string text_of(const Dims& shape) {
    std::vector<std::string> sizes;
    for (const Index size : shape) sizes.push_back(size == kAnySize ? "any" : std::to_string(size));
    return "[" + join(sizes, ", ") + "]";
  }

  // Returns the first alternative of a formula that this config gives a value.
  std::string formula_text(const std::string& formula) const {
    const ConfigMembers members(config_.file, architecture_.defaults, architecture_.computed);
    const std::vector<std::string> alternatives = split(formula, ';');
    const auto used = std::find_if(alternatives.begin(), alternatives.end(),
                                   [&](const std::string& text) { return members.evaluate(text).has_value(); });
    return in_usual_notation(used == alternatives.end() ? alternatives[0] : *used);
  }

  void explain(const ArchitectureParameter& p, const Dims& got, Finding& f) const {
    f.advice = "The config or the tensor belongs to another model: compare with the run's own config.";
    if (got.rank() != p.shape.rank()) return;
    std::vector<int> wrong;
    for (int d = 0; d < got.rank(); ++d)
      if (p.shape[d] != kAnySize && p.shape[d] != got[d]) wrong.push_back(d);
    for (const int d : wrong) {
      const Index want = p.shape[d], is = got[d];
      f.why.push_back("dim " + std::to_string(d) + ": " + formula_text(p.row->dims[d]) + " = " + with_commas(want));
      if (wrong.size() > 1 || is < 1 || want % is != 0) continue;  // a rank's part is smaller in one dimension
      f.id = "shape-part";
      f.why.push_back(with_commas(is) + " is 1/" + with_commas(want / is) + " of it: one of " + with_commas(want / is) +
                      " tensor-parallel parts");
      f.advice = "Look for the files of the other ranks, or save again with the tensors gathered.";
    }
  }

  // Drops missing parameters that may be stored under another name, because a tensor with an unknown name has their
  // shape. Also drops poolers: models are saved without them (add_pooling_layer=False).
  void leave_out_explained() {
    std::set<Dims> unknown;
    bool has_pooler = false;
    for (const auto& [name, tensor] : stored_) {
      if (!known_.contains(tensor)) unknown.insert(tensor->shape);
      has_pooler = has_pooler || name.find("pooler.") != std::string::npos;
    }
    std::erase_if(missing_, [&](const ArchitectureParameter* p) {
      const bool may_be_renamed =
          unknown.contains(p->shape) ||
          std::any_of(unknown.begin(), unknown.end(), [&](const Dims& shape) { return has_any(*p) && p->fits(shape); });
      return may_be_renamed || (!has_pooler && p->name.find("pooler.") != std::string::npos);
    });
  }
  static bool has_any(const ArchitectureParameter& p) {
    return std::any_of(p.row->dims.begin(), p.row->dims.end(), [](const std::string& dim) { return dim == "?"; });
  }

  void report_missing() {
    leave_out_explained();
    if (missing_.empty()) return;
    Finding f{Severity::kError, "missing-tensors", {}, {}, {}, "", ""};
    for (const ArchitectureParameter* p : missing_) f.tensors.push_back(name_of(*p));
    f.what = std::string(missing_.size() == 1 ? "is" : "are") + " missing, and the " + printable(architecture_.name) +
             " of " + config_.path + " has " + (missing_.size() == 1 ? "it" : "them");
    f.why.push_back(count_of(std::ssize(missing_), "tensor") + " of " +
                    with_commas(std::ssize(missing_) + std::ssize(known_)));
    f.advice = "Look for them in another save, or in the model's other files.";
    out_.findings.push_back(std::move(f));
  }

  const Architecture& architecture_;
  const ArchitectureModel& model_;
  const ModelConfig& config_;
  const std::set<std::string>& contradicted_;
  std::string prefix_;
  std::unordered_map<std::string, const Tensor*> stored_;
  std::set<std::string> others_;
  std::set<const Tensor*> known_;
  std::map<const ArchitectureRow*, std::vector<WrongShape>> wrong_shapes_;
  std::vector<const ArchitectureParameter*> missing_;
  Index elements_ = 0;
  bool is_in_memory_ = false;  // the names are those of transformers' memory
  ArchitectureAudit out_;
};

}  // namespace

ArchitectureAudit audit_architecture(const std::vector<NamedTensor>& tensors, const std::set<std::string>& others,
                                     const ModelConfig& config, const std::set<std::string>& contradicted) {
  ArchitectureAudit out;
  const auto architecture = find_architecture(config.model_type, config.architecture, config.families);
  if (!architecture || tensors.empty() || config.file.is_null()) return out;
  const auto model = parameters_of(*architecture, config.file);
  if (!model) {
    out.skipped = model.error().message();
    return out;
  }
  return ArchitectureComparison(*architecture, *model, tensors, others, config, contradicted).audit();
}

}  // namespace reshard
