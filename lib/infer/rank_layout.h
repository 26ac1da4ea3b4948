// SPDX-License-Identifier: Apache-2.0
// Describes how per-rank files join into whole tensors: for known placements, or inferred if nothing says how the
// ranks were laid out.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lib/layout/descriptor.h"
#include "lib/model/config.h"

namespace reshard {

// A tensor's name and placement.
struct NamedPlacement {
  std::string name;
  Placement placement;
};

// Returns the descriptor that places these tensors on a mesh: one rule for each distinct placement, with names folded
// into patterns. Axes that the mesh lacks are left out. Unsupported if the names do not fold into as many patterns as a
// descriptor may have, or are not UTF-8.
Result<LayoutDescriptor> describe_placements(const Mesh& mesh, std::span<const NamedPlacement> tensors,
                                             std::string name);

// The shape of one tensor in each rank's file; nothing if that file lacks it.
struct RankTensor {
  std::string name;
  std::vector<std::optional<Dims>> shapes;
};
// Returns whether two ranks, which hold tensor `tensor` in the same shape, have the same bytes of it.
using SameBytes = std::function<Result<bool>(std::size_t tensor, Index a, Index b)>;

// Infers the layout of ranks 0, 1, ... of a model whose family has known names and cuts: consecutive ranks that hold
// the same tensors form a pipeline stage, within which they are tp ranks, cut according to the family's table, or
// replicas. The descriptor contains the evidence. Shapes must agree with the config, if there is one; tensors that are
// not cut must be equal on all ranks of their stage; and without a config some that are cut must differ. Unsupported,
// with reasons, if no layout or several fit. `where` begins the messages. Each tensor must have a shape on some rank.
Result<LayoutDescriptor> infer_rank_layout(const std::string& where, std::span<const RankTensor> tensors, Index ranks,
                                           const ModelConfig* config, Families families, const SameBytes& same_bytes);

}  // namespace reshard
