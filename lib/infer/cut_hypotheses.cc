// SPDX-License-Identifier: Apache-2.0
#include "lib/infer/cut_hypotheses.h"

#include <initializer_list>
#include <utility>

#include "lib/layout/layout.h"

namespace reshard::cut_hypotheses {
namespace {

std::optional<Owner> owner_of(const Box& box, const Dims& shape, const CutHypothesis& hypothesis, const Axes& axes) {
  Owner owner;
  Box local = whole(shape);
  for (const Cut& cut : hypothesis.cuts) {
    const Index n = cut.by_tp ? axes.tp : axes.fsdp;
    const Index piece = ceil_div(local.shape[cut.dim], n);
    const Index k = (box.begin(cut.dim) - local.begin(cut.dim)) / piece;
    if (k < 0 || k >= n) return std::nullopt;
    const Interval part = chunk(local.shape[cut.dim], n, k);
    local.origin[cut.dim] += part.begin;
    local.shape[cut.dim] = part.end - part.begin;
    if (local.empty()) return std::nullopt;
    (cut.by_tp ? owner.tp : owner.fsdp) = static_cast<std::int32_t>(k);
  }
  if (local != box) return std::nullopt;
  return owner;
}

}  // namespace

std::vector<CutHypothesis> cut_hypotheses_for(int rank, const Axes& axes) {
  std::vector<CutHypothesis> hypotheses;
  const auto add = [&](std::initializer_list<Cut> cuts, bool is_usual) {
    CutHypothesis hypothesis{{}, is_usual};
    for (const Cut& c : cuts)
      if ((c.by_tp ? axes.tp : axes.fsdp) > 1) hypothesis.cuts.push_back(c);
    if (hypothesis.cuts.size() == cuts.size() || is_usual) hypotheses.push_back(std::move(hypothesis));
  };
  if (rank == 0) return hypotheses;
  if (axes.fsdp > 1) add({{0, false}}, true);
  if (axes.tp > 1) {
    for (int d = 1; d < rank; ++d) add({{d, true}, {0, false}}, true);
    add({{0, true}, {0, false}}, true);
    add({{0, false}, {0, true}}, false);
    for (int d = 0; d < rank && axes.fsdp > 1; ++d) add({{d, true}}, false);
  }
  for (int d = 1; d < rank; ++d) add({{d, false}}, false);
  return hypotheses;
}

std::optional<std::vector<Owner>> owners_of(const FragmentList& boxes, const Dims& shape,
                                            const CutHypothesis& hypothesis, const Axes& axes) {
  std::vector<Owner> owners;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const Box box = boxes.box(i);
    const auto owner = box.empty() ? Owner{} : owner_of(box, shape, hypothesis, axes);
    if (!owner) return std::nullopt;
    if (i == 0) owners.reserve(boxes.size());
    owners.push_back(*owner);
  }
  return owners;
}

}  // namespace reshard::cut_hypotheses
