// How the files of ranks join to whole tensors: a descriptor for known placements, and one found out where nothing says
// how the ranks were laid out.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lib/layout/descriptor.h"
#include "lib/model/config.h"

namespace reshard {

// A tensor's name and how it lies.
struct NamedPlacement {
  std::string name;
  Placement placement;
};

// The descriptor that places these tensors so on a mesh: a rule for each way of being cut, names folded into patterns.
// Axes that the mesh has not are left out. Unsupported where the names do not fold into as many patterns as a
// descriptor may have, or are no UTF-8.
Result<LayoutDescriptor> describe_placements(const Mesh& mesh, std::span<const NamedPlacement> tensors,
                                             std::string name);

// What the files of ranks hold of one tensor: the shape in each rank's file, nothing where it is not in there.
struct RankTensor {
  std::string name;
  std::vector<std::optional<Dims>> shapes;
};
// Whether tensor number `tensor` has the same bytes in the files of two ranks that hold it in the same shape.
using SameBytes = std::function<Result<bool>(std::size_t tensor, Index a, Index b)>;

// The layout of ranks 0, 1, ... of a model whose family names and cuts are known: consecutive ranks that hold the same
// tensors are one pipeline stage, and within it they are tp ranks, cut as the family's table has it, or copies.
// Evidence stands in the descriptor. Shapes must agree with the config where there is one, tensors that are not cut
// must be equal on all ranks of their stage, and without a config some that are cut must differ. Unsupported, with the
// reasons, where no layout fits or several do; `where` begins the messages. The tensors have a shape in some rank.
Result<LayoutDescriptor> infer_rank_layout(const std::string& where, std::span<const RankTensor> tensors, Index ranks,
                                           const ModelConfig* config, Families families, const SameBytes& same_bytes);

}  // namespace reshard
