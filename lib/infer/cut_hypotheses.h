// SPDX-License-Identifier: Apache-2.0
// Hypotheses on how FSDP and tensor parallelism cut a tensor, and the owners of boxes under each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "lib/checkpoint/catalog.h"
#include "lib/layout/box.h"

namespace reshard::cut_hypotheses {

// The sizes of the two axes that cut tensors. The other axes, pp and dp_replicate, decide which ranks write.
struct Axes {
  Index fsdp = 1;  // dp_shard x cp
  Index tp = 1;
};

// One cut of one dimension along one axis.
struct Cut {
  int dim = 0;
  bool by_tp = false;
};

// A possible sharding of a tensor: its cuts from left to right.
struct CutHypothesis {
  std::vector<Cut> cuts;
  bool is_usual = true;  // the default of FSDP2 and torch's TP styles

  bool cuts_by_tp() const {
    return std::any_of(cuts.begin(), cuts.end(), [](const Cut& c) { return c.by_tp; });
  }
  bool is_strided() const { return cuts.size() == 2 && cuts[0].by_tp && cuts[0].dim == cuts[1].dim; }
};

// Returns the hypotheses for a tensor of this rank, the usual ones first.
std::vector<CutHypothesis> cut_hypotheses_for(int rank, const Axes& axes);

// The coordinates of the ranks that own a box; -1 if all ranks along that axis do.
struct Owner {
  std::int32_t fsdp = -1;
  std::int32_t tp = -1;
};

// Returns the owner of each box of a list, or nothing if one of the boxes belongs to nobody under the hypothesis.
std::optional<std::vector<Owner>> owners_of(const FragmentList& boxes, const Dims& shape,
                                            const CutHypothesis& hypothesis, const Axes& axes);

}  // namespace reshard::cut_hypotheses
