// SPDX-License-Identifier: Apache-2.0
#include "lib/infer/mesh_inference.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/checkpoint/state_key.h"
#include "lib/infer/cut_hypotheses.h"
#include "lib/infer/mesh_choice.h"
#include "lib/layout/stages.h"

namespace reshard {
namespace {

using cut_hypotheses::Cut, cut_hypotheses::CutHypothesis;

constexpr std::size_t kShownNames = 3;

std::string span_text(Index first, Index last) {
  return first == last ? with_commas(first) : with_commas(first) + " to " + with_commas(last);
}

class Inference {
 public:
  Inference(const Catalog& catalog, std::optional<Index> dataloader_ranks)
      : catalog_(catalog), dataloader_ranks_(dataloader_ranks), choice_(choose_mesh(catalog)) {
    if (choice_.best) best_ = &*choice_.best;
    out_.ranks = choice_.ranks;
  }

  InferredMesh run() {
    report_writers();
    if (best_) {
      look_at_blocks();
      report_pipeline();
      report_replicas();
      report_fsdp();
      report_tp();
      report_oddities();
      list_hypotheses();
    } else {
      explain_nothing();
    }
    describe_placements();
    return std::move(out_);
  }

 private:
  void report_writers() {
    if (const Index absent = choice_.ranks - choice_.writers; absent > 0)
      out_.notes.push_back("The highest file number is " + with_commas(choice_.ranks - 1) + ", but " +
                           count_of(absent, "rank") + " below it " + (absent == 1 ? "has" : "have") + " no file.");
  }

  void explain_nothing() {
    if (out_.ranks == 1) {
      out_.hypotheses.emplace_back();
      out_.placed.push_back({{Placement()}, std::vector<std::int32_t>(catalog_.tensors().size(), 0)});
    } else {
      out_.notes.emplace_back("Every tensor is whole, and nothing tells how many ranks there were.");
    }
  }

  // ---- Pipeline stages and replicas

  struct BlockRange {
    std::int32_t first = INT32_MAX;
    std::int32_t last = -1;
    void add(std::int32_t block) {
      first = std::min(first, block);
      last = std::max(last, block);
    }
  };

  void look_at_blocks() {
    if (out_.ranks == 0) return;
    const std::vector<RankPosition> at = choice_.positions(best_->axes);
    blocks_ = out_.ranks / (best_->axes.fsdp * best_->axes.tp);
    block_wrote_.assign(blocks_, 0);
    for (const Tensor& t : catalog_.tensors()) {
      BlockRange range;
      for (const FragmentList* list : {&t.fragments, &t.replicas})
        for (std::size_t i = 0; i < list->size(); ++i) {
          const std::int32_t block = at[list->extent(i).file].block;
          range.add(block);
          block_wrote_[block] = 1;
        }
      if (range.last < 0) continue;
      if (const Index layer = layer_number(t.key()); layer >= 0) {
        BlockRange& all = layers_[layer];
        all.add(range.first);
        all.add(range.last);
      }
    }
    // The most stages for which each layer stays within one stage and each stage has a layer.
    for (Index pp = blocks_; pp > 1 && stages_ == 1; --pp)
      if (blocks_ % pp == 0 && layers_stay_in_stages(blocks_ / pp)) stages_ = pp;
  }

  bool layers_stay_in_stages(Index blocks_a_stage) const {
    std::set<Index> seen;
    for (const auto& [layer, range] : layers_) {
      if (range.first / blocks_a_stage != range.last / blocks_a_stage) return false;
      seen.insert(range.first / blocks_a_stage);
    }
    return std::ssize(seen) == blocks_ / blocks_a_stage;
  }

  void report_pipeline() {
    if (stages_ == 1) return;
    const Index a_stage = out_.ranks / stages_;
    std::vector<std::string> parts;
    for (Index s = 0; s < stages_; ++s) {
      std::vector<Index> written;
      for (const auto& [layer, range] : layers_)
        if (range.first / (blocks_ / stages_) == s) written.push_back(layer);
      std::vector<std::string> texts = runs_of(written, " to ");
      if (texts.size() > 3) texts = {texts[0], texts[1], "..."};
      parts.push_back("ranks " + span_text(s * a_stage, (s + 1) * a_stage - 1) + " write layers " + join(texts, ", "));
      if (stages_ > 3 && s == 0) {
        parts.emplace_back("...");
        s = stages_ - 2;
      }
    }
    // If nothing is cut, a stage may just mean that some ranks happened to write some tensors.
    const bool is_certain = best_->axes.fsdp * best_->axes.tp > 1 || catalog_.tensors().size() >= 8 * layers_.size();
    out_.axes.push_back({"pp", stages_, is_certain ? Confidence::kCertain : Confidence::kLikely, join(parts, "; ")});
  }

  bool stores_copies() const {
    return std::any_of(catalog_.tensors().begin(), catalog_.tensors().end(),
                       [](const Tensor& t) { return t.replicas.size() > 0; });
  }

  void report_replicas() {
    InferredAxis axis{"dp_replicate", 1, Confidence::kUnknown, ""};
    const Index group = best_->axes.fsdp * best_->axes.tp;
    if (out_.ranks == 0) {
      axis.size = 0;
      axis.evidence = "replicas leave no trace if file names do not tell the rank";
      out_.axes.push_back(std::move(axis));
      return;
    }
    replicas_ = blocks_ / stages_;
    axis.size = replicas_;
    std::set<Index> that_wrote;
    for (Index b = 0; b < blocks_; ++b)
      if (block_wrote_[b]) that_wrote.insert(b % replicas_);
    if (replicas_ == 1) {
      if (group == 1) return;  // pipeline alone
      axis.confidence = Confidence::kLikely;
      axis.evidence =
          "each box was written by the rank that owns it, and no rank is left over; a save of a single replica " +
          std::string("would look the same");
    } else if (that_wrote.size() > 1) {
      axis.confidence = group > 1 || best_->misfits > 0 ? Confidence::kCertain : Confidence::kLikely;
      if (stores_copies())
        axis.evidence = "each box is stored by " + count_of(replicas_, "rank") + ": r, r + " + with_commas(group) +
                        (replicas_ > 2 ? ", ..." : "");
      else
        axis.evidence = group > 1 ? "ranks take turns: some boxes were written by rank r, others by rank r + " +
                                        with_commas(group) + ": each is held " + with_commas(replicas_) +
                                        " times and stored once"
                                  : "every tensor is whole, and different ranks write different ones";
    } else {
      axis.confidence = Confidence::kLikely;
      const Index last = group * replicas_ - 1;
      axis.evidence = std::string(stages_ > 1 ? "in each stage, " : "") + (last > group ? "ranks " : "rank ") +
                      span_text(group, last) + " wrote no tensor: " +
                      (last > group ? "they hold copies, and the lowest ranks saved them"
                                    : "it holds copies, and the lowest ranks saved them");
    }
    if (best_->misfits > 0) axis.confidence = std::min(axis.confidence, Confidence::kLikely);
    out_.axes.push_back(std::move(axis));
  }

  // ---- The axes that cut

  Confidence cut_confidence() const {
    if (best_->misfits > 0 || !choice_.rivals.empty() || out_.ranks == 0) return Confidence::kLikely;
    return Confidence::kCertain;
  }

  // Returns "wo, w2": the distinct last names of the tensors that `wanted` selects, the model's before the optimizer's.
  template <class Wanted>
  std::string names_of(Wanted wanted) const {
    std::vector<std::string> names;
    for (const bool model : {true, false}) {
      for (std::size_t i = 0; i < catalog_.tensors().size(); ++i) {
        const Tensor& t = catalog_.tensors()[i];
        if (names.size() > kShownNames) break;
        if (!wanted(i)) continue;
        if ((split_state_key(t.key()).kind == StateKind::kModel) != model) continue;
        if (std::string name = leaf_name(t.name); std::find(names.begin(), names.end(), name) == names.end())
          names.push_back(printable(name));
      }
      if (!names.empty()) break;
    }
    if (names.size() > kShownNames) names.back() = "...";
    return join(names, ", ");
  }

  // Returns the names of tensors cut along an axis in the first or a later dimension. `strided`: cut along both axes,
  // tp first.
  std::string names_cut(bool by_tp, bool on_first_dim, std::optional<bool> strided = std::nullopt) const {
    return names_of([&](std::size_t i) {
      const CutHypothesis* hypothesis = best_->hypothesis_of[i];
      if (!hypothesis || (strided && hypothesis->is_strided() != *strided)) return false;
      return std::any_of(hypothesis->cuts.begin(), hypothesis->cuts.end(),
                         [&](const Cut& c) { return c.by_tp == by_tp && (c.dim == 0) == on_first_dim; });
    });
  }

  void report_fsdp() {
    const Index fsdp = best_->axes.fsdp;
    if (fsdp == 1) return;
    std::vector<std::string> parts;
    const std::string plain = names_cut(false, true, false);
    if (!plain.empty()) parts.push_back(plain + " cut in " + with_commas(fsdp) + " on dim 0");
    if (const std::string inside = names_cut(false, true, true); !inside.empty())
      parts.push_back(inside + (plain.empty() ? " cut" : "") + " in " + with_commas(fsdp) + " inside each tp block");
    if (const std::string later = names_cut(false, false); !later.empty())
      parts.push_back(later + " in " + with_commas(fsdp) + " on a later dim");
    const InferredAxis cp = context_parallel(fsdp);
    cp_size_ = std::max<Index>(cp.size, 1);
    shard_size_ = fsdp / cp_size_;
    if (cp_size_ > 1) parts.push_back("of these " + with_commas(fsdp) + ", cp takes " + with_commas(cp_size_));
    out_.axes.push_back({"dp_shard", shard_size_, cut_confidence(), join(parts, "; ")});
    if (cp.size != 1) out_.axes.push_back(cp);
  }

  // Determines how much of FSDP's axis is context parallelism; only the data loader tells.
  InferredAxis context_parallel(Index fsdp) {
    InferredAxis cp{"cp", 0, Confidence::kUnknown,
                    "FSDP shards over dp_shard x cp together; only dataloader.world_size tells them apart"};
    if (!dataloader_ranks_ || out_.ranks == 0) return cp;
    const Index dp = *dataloader_ranks_, sharing = fsdp * replicas_;
    const std::string said = "dataloader.world_size = " + with_commas(dp);
    if (dp <= 0 || sharing % dp != 0 || fsdp % (sharing / dp) != 0) {
      out_.notes.push_back(said + " does not fit " + count_of(sharing, "data-parallel rank") + ".");
      return cp;
    }
    cp.size = sharing / dp;
    cp.confidence = std::min(cut_confidence(), Confidence::kLikely);
    cp.evidence = said + " is dp_replicate x dp_shard, and " + count_of(sharing, "rank") + " share the parameters";
    return cp;
  }

  void report_tp() {
    const Index tp = best_->axes.tp;
    if (tp == 1) return;
    std::vector<std::string> parts;
    if (const std::string rows = names_cut(true, false); !rows.empty())
      parts.push_back(rows + " cut in " + with_commas(tp) + " on dim 1");
    if (const std::string columns = names_cut(true, true); !columns.empty())
      parts.push_back(columns + (parts.empty() ? " cut" : "") + " in " + with_commas(tp) + " on dim 0" +
                      (best_->axes.fsdp > 1 ? ", before dp_shard cuts" : ""));
    const std::string untouched = names_of([&](std::size_t i) {
      const Tensor& t = catalog_.tensors()[i];
      const CutHypothesis* hypothesis = best_->hypothesis_of[i];
      return t.shape.rank() == 1 &&
             (hypothesis ? !hypothesis->cuts_by_tp() : choice_.patterns[choice_.pattern_of[i]].is_whole);
    });
    if (!untouched.empty()) parts.push_back(untouched + (best_->axes.fsdp > 1 ? " not cut by it" : " whole"));
    out_.axes.push_back({"tp", tp, cut_confidence(), join(parts, "; ")});
  }

  void report_oddities() {
    std::vector<std::string> names;
    Index odd = 0, experts = 0;
    for (std::size_t i = 0; i < catalog_.tensors().size(); ++i) {
      const Tensor& t = catalog_.tensors()[i];
      if (best_->hypothesis_of[i] || choice_.patterns[choice_.pattern_of[i]].is_whole) continue;
      if (t.shape.rank() > 2) {
        ++experts;
        continue;
      }
      ++odd;
      if (names.size() < kShownNames) names.push_back("'" + printable(t.name) + "'");
    }
    if (odd > 0)
      out_.notes.push_back(count_of(odd, "cut tensor") + (odd == 1 ? " does" : " do") + " not match this mesh: " +
                           join(names, ", ") + (odd > std::ssize(names) ? ", ..." : "") + ".");
    if (experts > 0)
      out_.notes.push_back(count_of(experts, "tensor") + " of three or more dimensions " +
                           (experts == 1 ? "is" : "are") + " cut differently: experts on a mesh of their own (ep).");
  }

  void list_hypotheses() {
    const auto add = [&](const MeshTrial& trial, Index pp, Index replicate, Index shard, Index cp) {
      if (out_.hypotheses.size() >= kMaxHypotheses) return;
      std::vector<MeshAxis> out;
      const std::array<MeshAxis, 5> all = {
          {{"pp", pp}, {"dp_replicate", replicate}, {"dp_shard", shard}, {"cp", cp}, {"tp", trial.axes.tp}}};
      for (const MeshAxis& axis : all)
        if (axis.size > 1) out.push_back(axis);
      out_.hypotheses.emplace_back(std::move(out));
      out_.placed.push_back(placements_of(trial, pp));
    };
    const bool has_shard = best_->axes.fsdp > 1;
    add(*best_, stages_, replicas_, has_shard ? shard_size_ : 1, has_shard ? std::max<Index>(cp_size_, 1) : 1);
    for (const MeshTrial& t : choice_.rivals)
      add(t, 1, std::max<Index>(out_.ranks, 1) / (t.axes.fsdp * t.axes.tp), t.axes.fsdp, 1);
  }

  TensorPlacements placements_of(const MeshTrial& trial, Index stages) const {
    TensorPlacements out;
    std::map<std::pair<const CutHypothesis*, Index>, std::int32_t> known;
    for (std::size_t i = 0; i < catalog_.tensors().size(); ++i) {
      const CutHypothesis* hypothesis = trial.hypothesis_of[i];
      if (!hypothesis && !choice_.patterns[choice_.pattern_of[i]].is_whole) {
        out.of_tensor.push_back(-1);
        continue;
      }
      const Index stage = stages > 1 ? stage_of_writers(catalog_.tensors()[i]) : -1;
      const auto [it, is_new] = known.emplace(std::pair(hypothesis, stage), static_cast<std::int32_t>(known.size()));
      if (is_new) out.placements.push_back(placement_of(hypothesis, stage));
      out.of_tensor.push_back(it->second);
    }
    return out;
  }

  static Placement placement_of(const CutHypothesis* hypothesis, Index stage) {
    Placement placement;
    placement.stage = stage;
    if (hypothesis)
      for (const Cut& c : hypothesis->cuts)
        placement.splits.push_back(c.by_tp ? Split{{"tp"}, c.dim} : Split{{"dp_shard", "cp"}, c.dim});
    return placement;
  }

  // Returns the stage whose ranks wrote all of a tensor, or -1 if there is none.
  Index stage_of_writers(const Tensor& tensor) const {
    const Index ranks_a_stage = out_.ranks / stages_;
    Index stage = -1;
    for (const FragmentList* list : {&tensor.fragments, &tensor.replicas})
      for (std::size_t i = 0; i < list->size(); ++i) {
        const Index its = choice_.writer_of[list->extent(i).file] / ranks_a_stage;
        if (stage >= 0 && its != stage) return -1;
        stage = its;
      }
    return stage;
  }

  // ---- Single tensors

  void describe_placements() {
    std::vector<std::string> by_grid(choice_.patterns.size());
    for (std::size_t i = 0; i < catalog_.tensors().size(); ++i) {
      const std::size_t p = choice_.pattern_of[i];
      const CutHypothesis* hypothesis = best_ ? best_->hypothesis_of[i] : nullptr;
      if (hypothesis && hypothesis->is_strided()) {
        out_.placements.push_back("strided shard(" + std::to_string(hypothesis->cuts[0].dim) + "): tp " +
                                  std::to_string(best_->axes.tp) + " x dp_shard " + std::to_string(best_->axes.fsdp));
        continue;
      }
      if (by_grid[p].empty()) by_grid[p] = grid_text(choice_.patterns[p]);
      out_.placements.push_back(hypothesis && by_grid[p] != "whole" ? hypothesis_text(*hypothesis, by_grid[p])
                                                                    : by_grid[p]);
    }
  }

  // Describes the degree of a cut, which exceeds the visible pieces if the last ranks got no elements.
  std::string hypothesis_text(const CutHypothesis& hypothesis, const std::string& seen) const {
    std::map<int, Index> degree;
    for (const Cut& c : hypothesis.cuts)
      degree.emplace(c.dim, 1).first->second *= c.by_tp ? best_->axes.tp : best_->axes.fsdp;
    std::vector<std::string> parts;
    for (const auto& [dim, n] : degree) parts.push_back("shard(" + std::to_string(dim) + ") x " + std::to_string(n));
    const std::string text = join(parts, ", ");
    return text == seen ? text : text + ", some of them empty";
  }

  std::string grid_text(const BoxPattern& pattern) const {
    const FragmentList& boxes = catalog_.tensors()[pattern.tensors[0]].fragments;
    if (pattern.is_whole) return volume(pattern.shape) == 0 ? "empty" : "whole";
    std::vector<std::string> parts;
    Index cells = 1, stored = 0;
    for (int d = 0; d < pattern.shape.rank(); ++d) {
      std::set<std::pair<Index, Index>> pieces;
      stored = 0;
      for (std::size_t i = 0; i < boxes.size(); ++i) {
        const Box box = boxes.box(i);
        if (box.empty()) continue;
        pieces.emplace(box.begin(d), box.end(d));
        ++stored;
      }
      const auto n = std::ssize(pieces);
      if (n > 1) parts.push_back("shard(" + std::to_string(d) + ") x " + std::to_string(n));
      const auto product = checked_mul(cells, n);
      cells = product && *product <= stored ? *product : stored + 1;
    }
    return cells == stored ? join(parts, ", ") : "irregular (" + with_commas(stored) + " boxes)";
  }

  const Catalog& catalog_;
  const std::optional<Index> dataloader_ranks_;
  const MeshChoice choice_;
  const MeshTrial* best_ = nullptr;  // of choice_; null: none
  InferredMesh out_;

  Index blocks_ = 1;  // groups of fsdp x tp ranks
  std::vector<char> block_wrote_;
  std::map<Index, BlockRange> layers_;
  Index stages_ = 1;
  Index replicas_ = 1;
  Index shard_size_ = 1;
  Index cp_size_ = 1;
};

}  // namespace

std::string_view confidence_name(Confidence confidence) {
  switch (confidence) {
    case Confidence::kCertain:
      return "certain";
    case Confidence::kLikely:
      return "likely";
    case Confidence::kUnknown:
      break;
  }
  return "unknown";
}

const InferredAxis* InferredMesh::find(std::string_view axis) const {
  for (const InferredAxis& a : axes)
    if (a.name == axis) return &a;
  return nullptr;
}

InferredMesh infer_mesh(const Catalog& catalog, std::optional<Index> dataloader_ranks) {
  return Inference(catalog, dataloader_ranks).run();
}

}  // namespace reshard
