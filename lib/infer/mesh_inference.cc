#include "lib/infer/mesh_inference.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <unordered_map>

#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/checkpoint/state_key.h"
#include "lib/infer/ways.h"
#include "lib/layout/stages.h"

namespace reshard {
namespace {

using ways::Axes, ways::Cut, ways::Owner, ways::Way;

constexpr Index kMaxRanks = 1'000'000;
constexpr std::size_t kMaxPatterns = 512;  // distinct cuts that choose the mesh; the others are only described
constexpr std::size_t kMaxTrials = 256;    // meshes that are held against the writers, the best by their boxes
constexpr std::size_t kMaxHypotheses = 8;
constexpr std::size_t kShownNames = 3;

// Tensors of one shape with the same boxes in the same order: a model's layers repeat a handful of these.
struct Pattern {
  std::vector<std::size_t> tensors;  // of the catalog
  Dims shape;
  bool is_whole = false;  // not cut
};

// Where the writer of each file stands on a mesh.
struct Position {
  std::int32_t fsdp = 0;
  std::int32_t tp = 0;
  std::int32_t block = 0;  // which group of fsdp x tp ranks
};

// How well a mesh explains the catalog.
struct Trial {
  Axes axes;
  Index misfits = 0;                   // tensors with a box that its writer would not have owned
  Index surprises = 0;                 // tensors that fit, but not as parallelism usually has it
  std::vector<const Way*> way_of;      // of each tensor; null: whole, or a misfit
  std::vector<std::vector<Way>> ways;  // by rank; what way_of points into

  auto badness() const { return std::pair(misfits, surprises); }
};

std::string leaf_name(std::string_view tensor) {
  for (const std::string_view suffix : {".weight", ".bias"})
    if (tensor.ends_with(suffix)) tensor.remove_suffix(suffix.size());
  return std::string(tensor.substr(tensor.rfind('.') + 1));
}

std::string span_text(Index first, Index last) {
  return first == last ? with_commas(first) : with_commas(first) + " to " + with_commas(last);
}

class Inference {
 public:
  Inference(const Catalog& catalog, std::optional<Index> dataloader_ranks)
      : catalog_(catalog), dataloader_ranks_(dataloader_ranks) {}

  InferredMesh run() {
    find_writers();
    find_patterns();
    choose();
    if (best_) {
      look_at_blocks();
      report_pipeline();
      report_replicas();
      report_fsdp();
      report_tp();
      report_oddities();
      list_hypotheses();
    }
    describe_placements();
    return std::move(out_);
  }

 private:
  // ---- what is there

  void find_writers() {
    std::vector<Index> seen;
    for (const CatalogFile& file : catalog_.files) {
      if (file.writer < 0 || file.writer >= kMaxRanks) return;
      writer_.push_back(static_cast<std::int32_t>(file.writer));
      seen.push_back(file.writer);
    }
    if (seen.empty()) return;
    std::sort(seen.begin(), seen.end());
    seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
    out_.ranks = seen.back() + 1;
    if (const Index absent = out_.ranks - static_cast<Index>(seen.size()); absent > 0)
      out_.notes.push_back("The highest file number is " + with_commas(seen.back()) + ", but " +
                           count_of(absent, "rank") + " below it " + (absent == 1 ? "has" : "have") + " no file.");
  }

  void find_patterns() {
    std::unordered_map<std::uint64_t, std::size_t> by_hash;
    pattern_of_.reserve(catalog_.tensors().size());
    for (std::size_t i = 0; i < catalog_.tensors().size(); ++i) {
      const Tensor& t = catalog_.tensors()[i];
      const auto [it, is_new] = by_hash.emplace(t.fragments.hash_of_boxes(), patterns_.size());
      if (!is_new) {
        Pattern& known = patterns_[it->second];
        const FragmentList& boxes = catalog_.tensors()[known.tensors[0]].fragments;
        if (known.shape == t.shape && t.fragments.has_boxes_of(boxes)) {
          known.tensors.push_back(i);
          pattern_of_.push_back(it->second);
          continue;
        }
      }
      pattern_of_.push_back(patterns_.size());
      patterns_.push_back({{i}, t.shape, is_whole(t)});
    }
  }

  static bool is_whole(const Tensor& t) {
    Index boxes = 0;
    for (std::size_t i = 0; i < t.fragments.size() && boxes < 2; ++i) boxes += t.fragments.box(i).empty() ? 0 : 1;
    return boxes < 2;
  }

  // ---- choosing

  // Without file names that tell the writers, as many ranks as the most cut tensor has boxes.
  Index ranks_to_explain() const {
    if (out_.ranks > 0) return out_.ranks;
    std::size_t most = 0;
    for (const Pattern& p : patterns_) most = std::max(most, catalog_.tensors()[p.tensors[0]].fragments.size());
    return std::min(static_cast<Index>(most), kMaxRanks);
  }

  void choose() {
    const Index ranks = ranks_to_explain();
    if (ranks < 2) return explain_nothing(ranks);
    std::vector<std::size_t> cut;
    Index surprising_if_fsdp = 0;  // parameters that are whole, although FSDP cuts everything
    for (std::size_t p = 0; p < patterns_.size(); ++p) {
      if (!patterns_[p].is_whole) cut.push_back(p);
      if (patterns_[p].is_whole && patterns_[p].shape.rank() > 0 && patterns_[p].shape[0] > 1)
        for (const std::size_t i : patterns_[p].tensors)
          surprising_if_fsdp += split_state_key(catalog_.tensors()[i].key()).kind == StateKind::kModel ? 1 : 0;
    }
    if (cut.empty() && out_.ranks == 0) return explain_nothing(0);
    std::stable_sort(cut.begin(), cut.end(), [&](std::size_t a, std::size_t b) {
      return patterns_[a].tensors.size() > patterns_[b].tensors.size();
    });
    cut.resize(std::min(cut.size(), kMaxPatterns));

    std::vector<Trial> trials;
    for (Index tp = 1; tp <= ranks; ++tp) {
      if (ranks % tp != 0) continue;
      for (Index fsdp = 1; fsdp <= ranks / tp; ++fsdp)
        if (ranks / tp % fsdp == 0) trials.push_back(structural_trial({fsdp, tp}, cut, surprising_if_fsdp));
    }
    // Equals stay in order: the one with less tensor parallelism is preferred.
    std::stable_sort(trials.begin(), trials.end(),
                     [](const Trial& a, const Trial& b) { return a.badness() < b.badness(); });
    trials.resize(std::min(trials.size(), kMaxTrials));
    for (Trial& trial : trials) {
      if (best_ && trial.badness() > best_->badness()) break;
      try_writers(trial);
      if (best_ && trial.badness() > best_->badness()) continue;
      if (best_ && trial.badness() == best_->badness()) {
        if (rivals_.size() < kMaxHypotheses) rivals_.push_back(std::move(trial));
        continue;
      }
      rivals_.clear();
      best_ = std::move(trial);
    }
  }

  void explain_nothing(Index ranks) {
    if (ranks == 1 && out_.ranks == 1) {
      out_.hypotheses.emplace_back();
      out_.placed.push_back({{Placement()}, std::vector<std::int32_t>(catalog_.tensors().size(), 0)});
    } else {
      out_.notes.emplace_back("Every tensor is whole, and nothing tells how many ranks there were.");
    }
  }

  // Counts what does not fit whoever wrote it.
  Trial structural_trial(const Axes& axes, const std::vector<std::size_t>& cut, Index surprising_if_fsdp) const {
    Trial trial;
    trial.axes = axes;
    bool tp_is_seen = axes.tp == 1;
    for (int rank = 0; rank <= kMaxRank; ++rank) trial.ways.push_back(ways_for(rank, axes));
    for (const std::size_t p : cut) {
      const Pattern& pattern = patterns_[p];
      const auto n = static_cast<Index>(pattern.tensors.size());
      const FragmentList& boxes = catalog_.tensors()[pattern.tensors[0]].fragments;
      const Way* fit = nullptr;
      for (const Way& way : trial.ways[static_cast<std::size_t>(pattern.shape.rank())])
        if (!fit && owners_of(boxes, pattern.shape, way, axes)) fit = &way;
      if (!fit) {
        if (pattern.shape.rank() <= 2) trial.misfits += n;  // experts have a mesh of their own
        continue;
      }
      if (is_surprise(*fit, pattern.shape.rank())) trial.surprises += n;
      if (pattern.shape.rank() == 1 && fit->cuts_by_tp()) trial.misfits += norms_of(pattern);
      for (const Cut& c : fit->cuts) tp_is_seen = tp_is_seen || (c.by_tp && c.dim > 0);
    }
    if (axes.fsdp > 1) trial.surprises += surprising_if_fsdp;
    if (!tp_is_seen) ++trial.surprises;
    return trial;
  }

  // Vectors of weights: tensor parallelism cuts biases, but no norm.
  Index norms_of(const Pattern& pattern) const {
    return std::count_if(pattern.tensors.begin(), pattern.tensors.end(), [&](std::size_t i) {
      const std::string& key = catalog_.tensors()[i].key();
      return split_state_key(key).kind == StateKind::kModel && leaf_name(key).ends_with("norm");
    });
  }

  // Tensor parallelism leaves norms whole.
  static bool is_surprise(const Way& way, int rank) { return !way.is_usual || (rank == 1 && way.cuts_by_tp()); }

  std::vector<Position> positions(const Axes& axes) const {
    std::vector<Position> out;
    for (const std::int32_t w : writer_)
      out.push_back({static_cast<std::int32_t>(w / axes.tp % axes.fsdp), static_cast<std::int32_t>(w % axes.tp),
                     static_cast<std::int32_t>(w / axes.tp / axes.fsdp)});
    return out;
  }

  // Finds the way of each tensor under which its boxes' writers owned them, and counts the tensors that have none.
  void try_writers(Trial& trial) const {
    const std::vector<Position> at = out_.ranks > 0 ? positions(trial.axes) : std::vector<Position>();
    trial.way_of.assign(catalog_.tensors().size(), nullptr);
    for (const Pattern& pattern : patterns_) {
      if (pattern.is_whole) continue;
      struct Fit {
        const Way* way;
        std::vector<Owner> owners;
      };
      std::vector<Fit> fits;
      const FragmentList& boxes = catalog_.tensors()[pattern.tensors[0]].fragments;
      for (const Way& way : trial.ways[static_cast<std::size_t>(pattern.shape.rank())])
        if (auto owners = owners_of(boxes, pattern.shape, way, trial.axes)) fits.push_back({&way, std::move(*owners)});
      for (const std::size_t i : pattern.tensors) {
        for (const Fit& fit : fits) {
          if (!at.empty() && !writers_agree(catalog_.tensors()[i].fragments, fit.owners, at)) continue;
          trial.way_of[i] = fit.way;
          break;
        }
        if (fits.empty() || pattern.shape.rank() > 2) continue;  // counted before
        const Way* way = trial.way_of[i];
        if (!way) {
          ++trial.misfits;
        } else if (is_surprise(*way, pattern.shape.rank()) && !is_surprise(*fits[0].way, pattern.shape.rank())) {
          ++trial.surprises;
        }
      }
    }
  }

  static bool writers_agree(const FragmentList& boxes, const std::vector<Owner>& owners,
                            const std::vector<Position>& at) {
    for (std::size_t i = 0; i < owners.size(); ++i) {
      const Position& p = at[boxes.extent(i).file];
      if ((owners[i].fsdp >= 0 && owners[i].fsdp != p.fsdp) || (owners[i].tp >= 0 && owners[i].tp != p.tp))
        return false;
    }
    return true;
  }

  // ---- pipeline stages and replicas

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
    const std::vector<Position> at = positions(best_->axes);
    blocks_ = out_.ranks / (best_->axes.fsdp * best_->axes.tp);
    block_wrote_.assign(static_cast<std::size_t>(blocks_), 0);
    for (const Tensor& t : catalog_.tensors()) {
      BlockRange range;
      for (const FragmentList* list : {&t.fragments, &t.replicas})
        for (std::size_t i = 0; i < list->size(); ++i) {
          const std::int32_t block = at[list->extent(i).file].block;
          range.add(block);
          block_wrote_[static_cast<std::size_t>(block)] = 1;
        }
      if (range.last < 0) continue;
      if (const Index layer = layer_number(t.name); layer >= 0) {
        BlockRange& all = layers_[layer];
        all.add(range.first);
        all.add(range.last);
      }
    }
    // The most stages for which each layer stays within one, and each stage has one.
    for (Index pp = blocks_; pp > 1 && stages_ == 1; --pp)
      if (blocks_ % pp == 0 && layers_stay_in_stages(blocks_ / pp)) stages_ = pp;
  }

  bool layers_stay_in_stages(Index blocks_a_stage) const {
    std::set<Index> seen;
    for (const auto& [layer, range] : layers_) {
      if (range.first / blocks_a_stage != range.last / blocks_a_stage) return false;
      seen.insert(range.first / blocks_a_stage);
    }
    return static_cast<Index>(seen.size()) == blocks_ / blocks_a_stage;
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
    // With nothing cut, a stage is only that some ranks happened to write some tensors.
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
      axis.evidence = "replicas leave no trace when file names do not tell the rank";
      out_.axes.push_back(std::move(axis));
      return;
    }
    replicas_ = blocks_ / stages_;
    axis.size = replicas_;
    std::set<Index> that_wrote;
    for (Index b = 0; b < blocks_; ++b)
      if (block_wrote_[static_cast<std::size_t>(b)]) that_wrote.insert(b % replicas_);
    if (replicas_ == 1) {
      if (group == 1) return;  // pipeline alone
      axis.confidence = Confidence::kLikely;
      axis.evidence =
          "each box was written by the rank that owns it, no rank is left over; a save of one replica alone " +
          std::string("would look the same");
    } else if (that_wrote.size() > 1) {
      axis.confidence = group > 1 || best_->misfits > 0 ? Confidence::kCertain : Confidence::kLikely;
      if (stores_copies())
        axis.evidence = "each box is in the files of " + with_commas(replicas_) + " ranks: r, r + " +
                        with_commas(group) + (replicas_ > 2 ? ", ..." : "");
      else
        axis.evidence = group > 1 ? "one box is written now by rank r, now by rank r + " + with_commas(group) +
                                        ": each is held " + with_commas(replicas_) + " times and stored once"
                                  : "every tensor is whole, and different ranks write different ones";
    } else {
      axis.confidence = Confidence::kLikely;
      axis.evidence = (stages_ > 1 ? "in each stage, ranks " : "ranks ") + span_text(group, group * replicas_ - 1) +
                      " wrote no tensor: they hold copies, and the lowest ranks saved them";
    }
    if (best_->misfits > 0) axis.confidence = std::min(axis.confidence, Confidence::kLikely);
    out_.axes.push_back(std::move(axis));
  }

  // ---- the axes that cut

  Confidence cut_confidence() const {
    if (best_->misfits > 0 || !rivals_.empty() || out_.ranks == 0) return Confidence::kLikely;
    return Confidence::kCertain;
  }

  // "wo, w2": distinct last names of the tensors that `wanted` picks, model before optimizer; empty if there are none.
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

  // Names of the tensors cut along an axis on dimension `dim`; strided: along both, tp first.
  std::string names_cut(bool by_tp, bool on_first_dim, std::optional<bool> strided = std::nullopt) const {
    return names_of([&](std::size_t i) {
      const Way* way = best_->way_of[i];
      if (!way || (strided && way->is_strided() != *strided)) return false;
      return std::any_of(way->cuts.begin(), way->cuts.end(),
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

  // How much of FSDP's axis is context parallelism: only the data loader tells.
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
      const Way* way = best_->way_of[i];
      return t.shape.rank() == 1 && (way ? !way->cuts_by_tp() : patterns_[pattern_of_[i]].is_whole);
    });
    if (!untouched.empty()) parts.push_back(untouched + (best_->axes.fsdp > 1 ? " not cut by it" : " whole"));
    out_.axes.push_back({"tp", tp, cut_confidence(), join(parts, "; ")});
  }

  void report_oddities() {
    std::vector<std::string> names;
    Index odd = 0, experts = 0;
    for (std::size_t i = 0; i < catalog_.tensors().size(); ++i) {
      const Tensor& t = catalog_.tensors()[i];
      if (best_->way_of[i] || patterns_[pattern_of_[i]].is_whole) continue;
      if (t.shape.rank() > 2) {
        ++experts;
        continue;
      }
      ++odd;
      if (names.size() < kShownNames) names.push_back("'" + printable(t.name) + "'");
    }
    if (odd > 0)
      out_.notes.push_back(count_of(odd, "cut tensor") + (odd == 1 ? " lies" : " lie") +
                           " otherwise than this mesh would have it: " + join(names, ", ") +
                           (odd > static_cast<Index>(names.size()) ? ", ..." : "") + ".");
    if (experts > 0)
      out_.notes.push_back(count_of(experts, "tensor") + " of three or more dimensions " +
                           (experts == 1 ? "is" : "are") + " cut otherwise: experts on a mesh of their own (ep).");
  }

  void list_hypotheses() {
    const auto add = [&](const Trial& trial, Index pp, Index replicate, Index shard, Index cp) {
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
    for (const Trial& t : rivals_)
      add(t, 1, std::max<Index>(out_.ranks, 1) / (t.axes.fsdp * t.axes.tp), t.axes.fsdp, 1);
  }

  TensorPlacements placements_of(const Trial& trial, Index stages) const {
    TensorPlacements out;
    std::map<std::pair<const Way*, Index>, std::int32_t> known;
    for (std::size_t i = 0; i < catalog_.tensors().size(); ++i) {
      const Way* way = trial.way_of[i];
      if (!way && !patterns_[pattern_of_[i]].is_whole) {
        out.of_tensor.push_back(-1);
        continue;
      }
      const Index stage = stages > 1 ? stage_of_writers(catalog_.tensors()[i]) : -1;
      const auto [it, is_new] = known.emplace(std::pair(way, stage), static_cast<std::int32_t>(known.size()));
      if (is_new) out.placements.push_back(placement_of(way, stage));
      out.of_tensor.push_back(it->second);
    }
    return out;
  }

  static Placement placement_of(const Way* way, Index stage) {
    Placement placement;
    placement.stage = stage;
    if (way)
      for (const Cut& c : way->cuts)
        placement.splits.push_back(c.by_tp ? Split{{"tp"}, c.dim} : Split{{"dp_shard", "cp"}, c.dim});
    return placement;
  }

  // The stage whose ranks wrote all of a tensor; -1 when there is none.
  Index stage_of_writers(const Tensor& tensor) const {
    const Index ranks_a_stage = out_.ranks / stages_;
    Index stage = -1;
    for (const FragmentList* list : {&tensor.fragments, &tensor.replicas})
      for (std::size_t i = 0; i < list->size(); ++i) {
        const Index its = writer_[list->extent(i).file] / ranks_a_stage;
        if (stage >= 0 && its != stage) return -1;
        stage = its;
      }
    return stage;
  }

  // ---- single tensors

  void describe_placements() {
    std::vector<std::string> by_grid(patterns_.size());
    for (std::size_t i = 0; i < catalog_.tensors().size(); ++i) {
      const std::size_t p = pattern_of_[i];
      const Way* way = best_ ? best_->way_of[i] : nullptr;
      if (way && way->is_strided()) {
        out_.placements.push_back("strided shard(" + std::to_string(way->cuts[0].dim) + "): tp " +
                                  std::to_string(best_->axes.tp) + " x dp_shard " + std::to_string(best_->axes.fsdp));
        continue;
      }
      if (by_grid[p].empty()) by_grid[p] = grid_text(patterns_[p]);
      out_.placements.push_back(way && by_grid[p] != "whole" ? way_text(*way, by_grid[p]) : by_grid[p]);
    }
  }

  // The degree of a cut, which is more than the pieces one sees when the last ranks got none.
  std::string way_text(const Way& way, const std::string& seen) const {
    std::map<int, Index> degree;
    for (const Cut& c : way.cuts) degree.emplace(c.dim, 1).first->second *= c.by_tp ? best_->axes.tp : best_->axes.fsdp;
    std::vector<std::string> parts;
    for (const auto& [dim, n] : degree) parts.push_back("shard(" + std::to_string(dim) + ") x " + std::to_string(n));
    const std::string text = join(parts, ", ");
    return text == seen ? text : text + ", not all of them with elements";
  }

  std::string grid_text(const Pattern& pattern) const {
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
      const auto n = static_cast<Index>(pieces.size());
      if (n > 1) parts.push_back("shard(" + std::to_string(d) + ") x " + std::to_string(n));
      const auto product = checked_mul(cells, n);
      cells = product && *product <= stored ? *product : stored + 1;
    }
    return cells == stored ? join(parts, ", ") : "irregular (" + with_commas(stored) + " boxes)";
  }

  const Catalog& catalog_;
  std::optional<Index> dataloader_ranks_;
  InferredMesh out_;

  std::vector<std::int32_t> writer_;  // of each file
  std::vector<Pattern> patterns_;
  std::vector<std::size_t> pattern_of_;  // of each tensor
  std::optional<Trial> best_;
  std::vector<Trial> rivals_;  // fit as well
  Index blocks_ = 1;           // groups of fsdp x tp ranks
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
