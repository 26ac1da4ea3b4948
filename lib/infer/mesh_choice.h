// SPDX-License-Identifier: Apache-2.0
// Chooses the mesh that explains the boxes of a catalog best: tries every mesh of that many ranks, first on the boxes
// alone, then the best ones on the ranks that wrote them (for the rules see mesh_inference.h). Internal to lib/infer;
// mesh_inference.cc derives the statement about each axis.
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

// Tensors of one shape with the same boxes in the same order. The layers of a model repeat a handful of these.
struct BoxPattern {
  std::vector<std::size_t> tensors;  // indices in the catalog
  Dims shape;
  bool is_whole = false;  // not sharded
};

// The position of a file's writer on a mesh.
struct RankPosition {
  std::int32_t fsdp = 0;
  std::int32_t tp = 0;
  std::int32_t block = 0;  // index of its group of fsdp x tp ranks
};

// How well one mesh explains the catalog.
struct MeshTrial {
  cut_hypotheses::Axes axes;
  Index misfits = 0;    // tensors with a box that its writer would not own
  Index surprises = 0;  // tensors that fit, but not in the usual way
  // For each tensor, a pointer into `hypotheses`; null: whole, or a misfit.
  std::vector<const cut_hypotheses::CutHypothesis*> hypothesis_of;
  std::vector<std::vector<cut_hypotheses::CutHypothesis>> hypotheses;  // candidates, by tensor rank

  auto badness() const { return std::pair(misfits, surprises); }
};

struct MeshChoice {
  Index ranks = 0;                      // that took part in the save; 0: unknown
  Index writers = 0;                    // ranks that have a file
  std::vector<std::int32_t> writer_of;  // of each file
  std::vector<BoxPattern> patterns;
  std::vector<std::size_t> pattern_of;  // of each tensor
  std::optional<MeshTrial> best;        // none if nothing suggests more than one rank
  std::vector<MeshTrial> rivals;        // equally good meshes, at most kMaxHypotheses

  // Returns the positions of the files' writers.
  std::vector<RankPosition> positions(const cut_hypotheses::Axes& axes) const;
};
MeshChoice choose_mesh(const Catalog& catalog);

// Returns "wq" for "layers.0.attention.wq.weight".
std::string leaf_name(std::string_view tensor);

}  // namespace reshard
