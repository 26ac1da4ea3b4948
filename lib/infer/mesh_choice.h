// Which mesh explains the boxes of a catalog best: every mesh of so many ranks is tried, first on the boxes alone, the
// best then on who wrote them (mesh_inference.h says by which rules). Internal to lib/infer; what it means for each
// axis is told by mesh_inference.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/checkpoint/catalog.h"
#include "lib/infer/cut_hypotheses.h"

namespace reshard {

inline constexpr std::size_t kMaxHypotheses = 8;

// Tensors of one shape with the same boxes in the same order: a model's layers repeat a handful of these.
struct BoxPattern {
  std::vector<std::size_t> tensors;  // of the catalog
  Dims shape;
  bool is_whole = false;  // not cut
};

// Where the writer of each file stands on a mesh.
struct RankPosition {
  std::int32_t fsdp = 0;
  std::int32_t tp = 0;
  std::int32_t block = 0;  // which group of fsdp x tp ranks
};

// How well a mesh explains the catalog.
struct MeshTrial {
  cut_hypotheses::Axes axes;
  Index misfits = 0;                                         // tensors with a box that its writer would not have owned
  Index surprises = 0;                                       // tensors that fit, but not as parallelism usually has it
  std::vector<const cut_hypotheses::CutHypothesis*> way_of;  // of each tensor; null: whole, or a misfit
  std::vector<std::vector<cut_hypotheses::CutHypothesis>> ways;  // by rank; what way_of points into

  auto badness() const { return std::pair(misfits, surprises); }
};

struct MeshChoice {
  Index ranks = 0;                      // that took part in the save; 0: the files do not tell
  Index writers = 0;                    // of those, the ones with a file
  std::vector<std::int32_t> writer_of;  // each file
  std::vector<BoxPattern> patterns;
  std::vector<std::size_t> pattern_of;  // each tensor
  std::optional<MeshTrial> best;        // none: nothing tells more than that there was one rank, or not even that
  std::vector<MeshTrial> rivals;        // fit as well; at most kMaxHypotheses

  // Of each file's writer.
  std::vector<RankPosition> positions(const cut_hypotheses::Axes& axes) const;
};
MeshChoice choose_mesh(const Catalog& catalog);

// "wq" of "layers.0.attention.wq.weight".
std::string leaf_name(std::string_view tensor);

}  // namespace reshard
