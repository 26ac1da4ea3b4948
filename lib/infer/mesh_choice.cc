// SPDX-License-Identifier: Apache-2.0
#include "lib/infer/mesh_choice.h"

#include <algorithm>
#include <unordered_map>

#include "lib/checkpoint/state_key.h"

namespace reshard {
namespace {

using cut_hypotheses::Axes, cut_hypotheses::Cut, cut_hypotheses::Owner, cut_hypotheses::CutHypothesis;

constexpr Index kMaxRanks = 1'000'000;
constexpr std::size_t kMaxPatterns = 512;  // distinct shardings used to choose the mesh; others are only described
constexpr std::size_t kMaxTrials = 256;    // meshes that are checked against the writers, the best by their boxes

class MeshSearch {
 public:
  explicit MeshSearch(const Catalog& catalog) : catalog_(catalog) {}

  MeshChoice run() {
    find_writers();
    find_patterns();
    choose();
    return std::move(out_);
  }

 private:
  // ---- Collecting the facts

  void find_writers() {
    std::vector<Index> seen;
    for (const CatalogFile& file : catalog_.files) {
      if (file.writer < 0 || file.writer >= kMaxRanks) return;
      out_.writer_of.push_back(static_cast<std::int32_t>(file.writer));
      seen.push_back(file.writer);
    }
    if (seen.empty()) return;
    std::sort(seen.begin(), seen.end());
    seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
    out_.ranks = seen.back() + 1;
    out_.writers = std::ssize(seen);
  }

  void find_patterns() {
    std::unordered_map<std::uint64_t, std::size_t> by_hash;
    out_.pattern_of.reserve(catalog_.tensors().size());
    for (std::size_t i = 0; i < catalog_.tensors().size(); ++i) {
      const Tensor& t = catalog_.tensors()[i];
      const auto [it, is_new] = by_hash.emplace(t.fragments.hash_of_boxes(), out_.patterns.size());
      if (!is_new) {
        BoxPattern& known = out_.patterns[it->second];
        const FragmentList& boxes = catalog_.tensors()[known.tensors[0]].fragments;
        if (known.shape == t.shape && t.fragments.has_boxes_of(boxes)) {
          known.tensors.push_back(i);
          out_.pattern_of.push_back(it->second);
          continue;
        }
      }
      out_.pattern_of.push_back(out_.patterns.size());
      out_.patterns.push_back({{i}, t.shape, is_whole(t)});
    }
  }

  static bool is_whole(const Tensor& t) {
    Index boxes = 0;
    for (std::size_t i = 0; i < t.fragments.size() && boxes < 2; ++i) boxes += t.fragments.box(i).empty() ? 0 : 1;
    return boxes < 2;
  }

  // ---- Choosing

  // If file names do not tell the writers: as many ranks as the most sharded tensor has boxes.
  Index ranks_to_explain() const {
    if (out_.ranks > 0) return out_.ranks;
    std::size_t most = 0;
    for (const BoxPattern& p : out_.patterns) most = std::max(most, catalog_.tensors()[p.tensors[0]].fragments.size());
    return std::min<Index>(most, kMaxRanks);
  }

  void choose() {
    const Index ranks = ranks_to_explain();
    if (ranks < 2) return;
    std::vector<std::size_t> cut;
    Index surprising_if_fsdp = 0;  // parameters that are whole, although FSDP cuts everything
    for (std::size_t p = 0; p < out_.patterns.size(); ++p) {
      if (!out_.patterns[p].is_whole) cut.push_back(p);
      if (out_.patterns[p].is_whole && out_.patterns[p].shape.rank() > 0 && out_.patterns[p].shape[0] > 1)
        for (const std::size_t i : out_.patterns[p].tensors)
          surprising_if_fsdp += split_state_key(catalog_.tensors()[i].key()).kind == StateKind::kModel ? 1 : 0;
    }
    if (cut.empty() && out_.ranks == 0) return;
    std::stable_sort(cut.begin(), cut.end(), [&](std::size_t a, std::size_t b) {
      return out_.patterns[a].tensors.size() > out_.patterns[b].tensors.size();
    });
    cut.resize(std::min(cut.size(), kMaxPatterns));

    std::vector<MeshTrial> trials;
    for (Index tp = 1; tp <= ranks; ++tp) {
      if (ranks % tp != 0) continue;
      for (Index fsdp = 1; fsdp <= ranks / tp; ++fsdp)
        if (ranks / tp % fsdp == 0) trials.push_back(structural_trial({fsdp, tp}, cut, surprising_if_fsdp));
    }
    // The sort is stable: among equals, less tensor parallelism is preferred.
    std::stable_sort(trials.begin(), trials.end(),
                     [](const MeshTrial& a, const MeshTrial& b) { return a.badness() < b.badness(); });
    trials.resize(std::min(trials.size(), kMaxTrials));
    for (MeshTrial& trial : trials) {
      if (out_.best && trial.badness() > out_.best->badness()) break;
      try_writers(trial);
      if (out_.best && trial.badness() > out_.best->badness()) continue;
      if (out_.best && trial.badness() == out_.best->badness()) {
        if (out_.rivals.size() < kMaxHypotheses) out_.rivals.push_back(std::move(trial));
        continue;
      }
      out_.rivals.clear();
      out_.best = std::move(trial);
    }
  }

  // Counts the tensors that do not fit any hypothesis, by their boxes alone.
  MeshTrial structural_trial(const Axes& axes, const std::vector<std::size_t>& cut, Index surprising_if_fsdp) const {
    MeshTrial trial;
    trial.axes = axes;
    bool tp_is_seen = axes.tp == 1;
    for (int rank = 0; rank <= kMaxRank; ++rank) trial.hypotheses.push_back(cut_hypotheses_for(rank, axes));
    for (const std::size_t p : cut) {
      const BoxPattern& pattern = out_.patterns[p];
      const auto n = std::ssize(pattern.tensors);
      const FragmentList& boxes = catalog_.tensors()[pattern.tensors[0]].fragments;
      const CutHypothesis* fit = nullptr;
      for (const CutHypothesis& hypothesis : trial.hypotheses[pattern.shape.rank()])
        if (!fit && owners_of(boxes, pattern.shape, hypothesis, axes)) fit = &hypothesis;
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

  // Returns the number of norm weights. Tensor parallelism cuts biases, but no norms.
  Index norms_of(const BoxPattern& pattern) const {
    return std::count_if(pattern.tensors.begin(), pattern.tensors.end(), [&](std::size_t i) {
      const std::string& key = catalog_.tensors()[i].key();
      return split_state_key(key).kind == StateKind::kModel && leaf_name(key).ends_with("norm");
    });
  }

  // Tensor parallelism leaves norms whole.
  static bool is_surprise(const CutHypothesis& hypothesis, int rank) {
    return !hypothesis.is_usual || (rank == 1 && hypothesis.cuts_by_tp());
  }

  // Finds the hypothesis for each tensor under which its boxes' writers owned them, and counts tensors without one.
  void try_writers(MeshTrial& trial) const {
    const std::vector<RankPosition> at = out_.ranks > 0 ? out_.positions(trial.axes) : std::vector<RankPosition>();
    trial.hypothesis_of.assign(catalog_.tensors().size(), nullptr);
    for (const BoxPattern& pattern : out_.patterns) {
      if (pattern.is_whole) continue;
      struct Fit {
        const CutHypothesis* hypothesis;
        std::vector<Owner> owners;
      };
      std::vector<Fit> fits;
      const FragmentList& boxes = catalog_.tensors()[pattern.tensors[0]].fragments;
      for (const CutHypothesis& hypothesis : trial.hypotheses[pattern.shape.rank()])
        if (auto owners = owners_of(boxes, pattern.shape, hypothesis, trial.axes))
          fits.push_back({&hypothesis, std::move(*owners)});
      for (const std::size_t i : pattern.tensors) {
        for (const Fit& fit : fits) {
          if (!at.empty() && !writers_agree(catalog_.tensors()[i].fragments, fit.owners, at)) continue;
          trial.hypothesis_of[i] = fit.hypothesis;
          break;
        }
        if (fits.empty() || pattern.shape.rank() > 2) continue;  // already counted
        const CutHypothesis* hypothesis = trial.hypothesis_of[i];
        if (!hypothesis) {
          ++trial.misfits;
        } else if (is_surprise(*hypothesis, pattern.shape.rank()) &&
                   !is_surprise(*fits[0].hypothesis, pattern.shape.rank())) {
          ++trial.surprises;
        }
      }
    }
  }

  static bool writers_agree(const FragmentList& boxes, const std::vector<Owner>& owners,
                            const std::vector<RankPosition>& at) {
    for (std::size_t i = 0; i < owners.size(); ++i) {
      const RankPosition& p = at[boxes.extent(i).file];
      if ((owners[i].fsdp >= 0 && owners[i].fsdp != p.fsdp) || (owners[i].tp >= 0 && owners[i].tp != p.tp))
        return false;
    }
    return true;
  }

  const Catalog& catalog_;
  MeshChoice out_;
};

}  // namespace

std::vector<RankPosition> MeshChoice::positions(const Axes& axes) const {
  std::vector<RankPosition> out;
  for (const std::int32_t w : writer_of)
    out.push_back({static_cast<std::int32_t>(w / axes.tp % axes.fsdp), static_cast<std::int32_t>(w % axes.tp),
                   static_cast<std::int32_t>(w / axes.tp / axes.fsdp)});
  return out;
}

MeshChoice choose_mesh(const Catalog& catalog) { return MeshSearch(catalog).run(); }

std::string leaf_name(std::string_view tensor) {
  for (const std::string_view suffix : {".weight", ".bias"})
    if (tensor.ends_with(suffix)) tensor.remove_suffix(suffix.size());
  return std::string(tensor.substr(tensor.rfind('.') + 1));
}

}  // namespace reshard
