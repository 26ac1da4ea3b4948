// SPDX-License-Identifier: Apache-2.0
#include "lib/infer/rank_layout.h"

#include <algorithm>
#include <map>
#include <unordered_map>

#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/checkpoint/state_key.h"
#include "lib/layout/stages.h"
#include "lib/model/family.h"
#include "lib/model/parameters.h"
#include "lib/model/parts.h"

namespace reshard {
namespace {

constexpr std::string_view kWayOut = "; describe how they join with --source-layout";

std::string ranks_text(Index first, Index count) {
  if (count == 1) return "rank " + std::to_string(first);
  return "ranks " + std::to_string(first) + " to " + std::to_string(first + count - 1);
}

// Returns the splits of a placement without axes that the mesh lacks.
std::vector<Split> splits_on(const Mesh& mesh, const Placement& placement) {
  std::vector<Split> out;
  for (Split s : placement.splits) {
    std::erase_if(s.axes, [&](const std::string& axis) { return mesh.size(axis) == 1; });
    if (!s.axes.empty()) out.push_back(std::move(s));
  }
  return out;
}

// The family's rule for a tensor in the ranks' files.
struct Known {
  std::string canonical;
  TensorParallelCut cut;
  bool is_vocabulary = false;
  Index stage = 0;   // the first stage that holds it
  Index stages = 1;  // number of stages that hold it

  bool is_cut(const Dims& shape) const { return cut.dim >= 0 && cut.dim < shape.rank(); }
};

class RankLayoutInference {
 public:
  RankLayoutInference(const std::string& where, std::span<const RankTensor> tensors, Index ranks,
                      const ModelConfig* config, Families families, const SameBytes& same_bytes)
      : where_(where),
        tensors_(tensors),
        ranks_(ranks),
        config_(config),
        families_(families),
        same_bytes_(same_bytes) {}

  Result<LayoutDescriptor> infer() {
    TRY(find_family());
    TRY(find_stages());
    TRY(know_tensors());
    if (per_stage_ == 1) return describe("", "each stage is in one file");
    TRY(check_whole_tensors());
    if (config_) return infer_from_config();
    return infer_from_contents();
  }

 private:
  Error refusal(const std::string& why) const { return unsupported(where_ + ": " + why + std::string(kWayOut)); }
  std::string name_of(std::size_t i) const { return tensor_text(tensors_[i].name); }

  Status find_family() {
    for (const RankTensor& t : tensors_) {
      Tensor tensor;
      tensor.name = t.name;
      tensor.shape = **std::find_if(t.shapes.begin(), t.shapes.end(), [](const auto& s) { return s.has_value(); });
      TRY(names_.add(std::move(tensor)));
    }
    TRY(find_parts(names_, {}, false, families_));
    const auto detected = detect_family(names_, config_, families_);
    if (!detected) return refusal("no model family knows the names of these tensors, and shapes alone are not enough");
    family_ = detected->family;
    return {};
  }

  // Stages are equal numbers of consecutive ranks that hold the same tensors. No layer is on two stages.
  Status find_stages() {
    std::vector<std::string> held(ranks_);  // per rank: '1' for each tensor it holds
    for (std::size_t r = 0; r < held.size(); ++r)
      for (const RankTensor& t : tensors_) held[r] += t.shapes[r] ? '1' : '0';
    per_stage_ = std::find_if(held.begin(), held.end(), [&](const auto& h) { return h != held[0]; }) - held.begin();
    if (per_stage_ == ranks_) return {};
    for (std::size_t r = 0; r < held.size(); ++r)
      if (const std::size_t first = r - r % static_cast<std::size_t>(per_stage_); held[r] != held[first])
        return uneven(held, r, first);
    if (ranks_ % per_stage_ != 0)
      return refusal(count_of(ranks_, "file") + " cannot be divided into stages of " + count_of(per_stage_, "rank"));
    for (const RankTensor& t : tensors_) {
      Index stages = 0;
      for (Index r = 0; r < ranks_; r += per_stage_) stages += t.shapes[r].has_value();
      if (stages > 1 && layer_number(t.name) >= 0) return uneven(held, per_stage_, 0);
    }
    return {};
  }

  Error uneven(const std::vector<std::string>& held, std::size_t a, std::size_t b) const {
    const std::size_t differs = std::mismatch(held[a].begin(), held[a].end(), held[b].begin()).first - held[a].begin();
    const bool has = held[a][differs] == '1';
    return refusal("the files contain neither the same tensors nor those of pipeline stages: " + name_of(differs) +
                   " is in the file of rank " + std::to_string(has ? a : b) + " and not in the file of rank " +
                   std::to_string(has ? b : a));
  }

  Status know_tensors() {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const StateKey key = split_state_key(names_.tensors()[i].key());
      const auto parsed = key.parameter.empty() ? std::nullopt : parse_name(*family_, key.parameter);
      if (!parsed || parsed->is_of_quantized())
        return refusal(name_of(i) + ": family " + std::string(family_->name) + " does not know how it is cut");
      Known known{canonical_key(*family_, names_.tensors()[i].key()), tensor_parallel_cut(*parsed),
                  parsed->rule->is_vocabulary(), -1, 0};
      for (Index stage = 0; stage < ranks_ / per_stage_; ++stage) {
        if (!shape(i, stage * per_stage_)) continue;
        if (known.stages++ == 0) known.stage = stage;
      }
      known_.push_back(std::move(known));
    }
    return {};
  }

  const std::optional<Dims>& shape(std::size_t i, Index rank) const { return tensors_[i].shapes[rank]; }
  Index first_rank(std::size_t i) const { return known_[i].stage * per_stage_; }
  bool is_cut(std::size_t i) const { return known_[i].is_cut(*shape(i, first_rank(i))); }

  Status check_whole_tensors() {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      if (is_cut(i)) continue;
      for (Index r = first_rank(i) + 1; r < first_rank(i) + per_stage_; ++r) {
        const bool same = shape(i, r) == shape(i, first_rank(i)) && TRY(same_bytes_(i, first_rank(i), r));
        if (!same)
          return refusal(name_of(i) + ", which every rank should hold whole, differs between rank " +
                         std::to_string(first_rank(i)) + " and rank " + std::to_string(r));
      }
    }
    return {};
  }

  // Returns why the shapes, joined over the ranks of a stage or unchanged, do not match the config; empty if they do.
  std::string misfit(const std::unordered_map<std::string, Dims>& expected, bool joined) const {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const auto wanted = expected.find(known_[i].canonical);
      if (wanted == expected.end()) continue;  // not in the config: for example optimizer state
      Dims got = *shape(i, first_rank(i));
      if (joined && is_cut(i)) {
        const int d = known_[i].cut.dim;
        for (Index r = first_rank(i) + 1; r < first_rank(i) + per_stage_; ++r)
          if (const auto& part = shape(i, r); part && part->rank() == got.rank())
            got[d] = checked_add(got[d], (*part)[d]).value_or(INT64_MAX);
      }
      if (got != fitting(i, got, wanted->second))
        return name_of(i) + " would be " + to_string(got) + ", " + config_->path + " says " + to_string(wanted->second);
    }
    return "";
  }

  // Returns the shape that a tensor may have instead of the config's: with padding rows of a vocabulary, or with
  // key-value heads repeated for the ranks that hold them.
  Dims fitting(std::size_t i, const Dims& got, Dims wanted) const {
    const Known& known = known_[i];
    if (got.rank() == 0 || wanted.rank() != got.rank()) return wanted;
    if (known.is_vocabulary) wanted[0] = std::max(wanted[0], got[0]);
    const Index heads = config_->num_key_value_heads();
    if (known.cut.heads == "num_key_value_heads" && heads > 0 && per_stage_ > heads && is_cut(i) && got != wanted)
      wanted[known.cut.dim] = checked_mul(wanted[known.cut.dim], per_stage_ / heads).value_or(INT64_MAX);
    return wanted;
  }

  Result<LayoutDescriptor> infer_from_config() {
    std::unordered_map<std::string, Dims> expected;
    for (const Parameter& p : TRY(parameters(*family_, *config_))) expected.emplace(p.name, p.shape);
    const std::string not_tp = misfit(expected, true), not_copies = misfit(expected, false);
    if (not_tp.empty() == not_copies.empty()) {
      if (not_tp.empty())
        return refusal(axis("tp") + " fits the shapes and so does " + axis("dp_replicate") + ": nothing is cut");
      return refusal("neither " + axis("tp") + " fits (" + not_tp + "), nor " + axis("dp_replicate") + " (" +
                     not_copies + ")");
    }
    return describe(not_tp.empty() ? "tp" : "dp_replicate", "with this layout the tensors have the shapes of " +
                                                                config_->path +
                                                                ", and those that are not cut are equal on all ranks");
  }

  Result<LayoutDescriptor> infer_from_contents() {
    bool any_equal = false, any_differs = false, is_any_cut = false;
    for (Index r = 1; r < per_stage_; ++r) {
      bool all_equal = true;
      for (std::size_t i = 0; i < tensors_.size() && all_equal; ++i) {
        if (!is_cut(i)) continue;
        is_any_cut = true;
        const Index first = first_rank(i);
        all_equal = shape(i, first + r) == shape(i, first) && TRY(same_bytes_(i, first, first + r));
      }
      (all_equal ? any_equal : any_differs) = true;
    }
    if (is_any_cut && any_differs && !any_equal)
      return describe("tp", "the tensors that family " + std::string(family_->name) +
                                " cuts differ between the ranks, and the others are equal");
    const std::string mixed = any_differs ? "some ranks hold equal parts and others not, as on a mesh of tp and data "
                                            "parallel ranks"
                                          : "all ranks hold the same bytes: " + axis("dp_replicate") +
                                                " fits, and "
                                                "so does " +
                                                axis("tp") + " with equal parts";
    return refusal(mixed + ". A config.json next to the files would tell");
  }

  std::string axis(std::string_view name) const { return std::string(name) + "=" + std::to_string(per_stage_); }

  // `within` is the axis of the ranks within a stage; empty: there is one rank.
  Result<LayoutDescriptor> describe(const std::string& within, const std::string& because) const {
    std::vector<MeshAxis> axes;
    const Index stages = ranks_ / per_stage_;
    if (stages > 1) axes.push_back({"pp", stages});
    if (!within.empty()) axes.push_back({within, per_stage_});
    std::vector<NamedPlacement> placements;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      Placement p;
      if (stages > 1 && known_[i].stages == 1) p.stage = known_[i].stage;
      if (within == "tp" && is_cut(i)) p.splits.push_back({{"tp"}, known_[i].cut.dim, known_[i].cut.sections});
      placements.push_back({tensors_[i].name, std::move(p)});
    }
    LayoutDescriptor layout = TRY(describe_placements(Mesh(std::move(axes)), placements, "inferred").context(where_));
    const std::string confidence = config_ || within.empty() ? "certain" : "likely";
    layout.evidence.push_back({layout.mesh->to_string(), confidence, because});
    for (Index s = 0; s < stages && stages > 1; ++s)
      layout.evidence.push_back(
          {"stage " + std::to_string(s), "certain", ranks_text(s * per_stage_, per_stage_) + " hold its tensors"});
    return layout;
  }

  const std::string& where_;
  std::span<const RankTensor> tensors_;
  Index ranks_;
  const ModelConfig* config_;
  const Families families_;
  const SameBytes& same_bytes_;
  Catalog names_;  // the tensors, for their keys
  const Family* family_ = nullptr;
  Index per_stage_ = 1;
  std::vector<Known> known_;
};

}  // namespace

Result<LayoutDescriptor> describe_placements(const Mesh& mesh, std::span<const NamedPlacement> tensors,
                                             std::string name) {
  LayoutDescriptor layout;
  layout.name = std::move(name);
  layout.mesh = mesh;
  const bool has_stages = mesh.size("pp") > 1;
  std::vector<std::vector<std::string>> stages(mesh.size("pp"));
  for (const NamedPlacement& t : tensors) {
    if (!is_utf8(t.name))
      return unsupported(tensor_text(t.name) + ": the name is not UTF-8, which a layout file cannot express");
    const auto splits = splits_on(mesh, t.placement);
    auto rule = std::find_if(layout.tensors.begin(), layout.tensors.end(),
                             [&](const TensorRule& r) { return r.splits == splits; });
    if (rule == layout.tensors.end()) rule = layout.tensors.insert(rule, TensorRule{{}, splits});
    rule->names.push_back(glob_escaped(t.name));
    if (has_stages && t.placement.stage >= 0) stages[t.placement.stage].push_back(glob_escaped(t.name));
  }
  for (TensorRule& rule : layout.tensors) rule.names = fold_names(rule.names);
  if (has_stages) {
    layout.pipeline.emplace();
    for (const auto& names : stages) layout.pipeline->stages.push_back(fold_names(names));
  }
  TRY(LayoutDescriptor::parse(to_text(layout.to_json()), layout.name));  // a layout has limits
  return layout;
}

Result<LayoutDescriptor> infer_rank_layout(const std::string& where, std::span<const RankTensor> tensors, Index ranks,
                                           const ModelConfig* config, Families families, const SameBytes& same_bytes) {
  return RankLayoutInference(where, tensors, ranks, config, families, same_bytes).infer();
}

}  // namespace reshard
