#include "lib/plan/overlay.h"

#include <algorithm>

#include "lib/base/text.h"

namespace reshard {
namespace {

Status check_covers(const std::vector<Cut>& cuts, Index extent) {
  Index next = 0;
  for (const Cut& cut : cuts) {
    if (cut.begin != next || cut.end <= cut.begin)
      return internal_error("plan: dimension of " + with_commas(extent) + ": expected a cut from " + with_commas(next) +
                            " on, got " + with_commas(cut.begin) + " to " + with_commas(cut.end));
    next = cut.end;
  }
  if (next == extent) return {};
  return internal_error("plan: expected cuts of a dimension of " + with_commas(extent) + ", got " + with_commas(next));
}

}  // namespace

SubMesh::SubMesh(const Mesh& mesh, const std::vector<std::string>& axes) {
  for (const std::string& name : axes) {
    Index stride = 1;
    for (auto axis = mesh.axes().rbegin(); axis != mesh.axes().rend(); ++axis) {
      if (axis->name == name) {
        steps_.push_back({axis->size, stride});
        count_ *= axis->size;
        break;
      }
      stride *= axis->size;
    }
  }
}

Index SubMesh::rank(Index k) const {
  Index rank = 0;
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
    rank += k % step->size * step->stride;
    k /= step->size;
  }
  return rank;
}

Index SubMesh::number(Index rank) const {
  Index k = 0;
  for (const Step& step : steps_) k = k * step.size + rank / step.stride % step.size;
  return k;
}

std::vector<Cut> cuts_of(const Mesh& mesh, const std::vector<Split>& splits, Index extent) {
  Placement alone;
  std::vector<std::string> axes;
  for (const Split& split : splits) {
    alone.splits.push_back({split.axes, 0, split.groups});
    axes.insert(axes.end(), split.axes.begin(), split.axes.end());
  }
  const SubMesh ranks(mesh, axes);
  std::vector<Cut> cuts;
  for (Index k = 0; k < ranks.count(); ++k)
    for (const LocalBox& piece : owned_boxes(mesh, alone, {extent}, ranks.rank(k)))
      if (!piece.box.empty()) cuts.push_back({piece.box.begin(0), piece.box.end(0), piece.at[0], k, ranks.rank(k)});
  std::sort(cuts.begin(), cuts.end(), [](const Cut& a, const Cut& b) { return a.begin < b.begin; });
  return cuts;
}

Result<Overlay> Overlay::make(const std::vector<Cut>& source, const std::vector<Cut>& target) {
  const Index extent = source.empty() ? 0 : source.back().end;
  TRY(check_covers(source, extent));
  TRY(check_covers(target, extent));
  std::vector<Entry> entries;
  entries.reserve(source.size() + target.size());
  auto to = target.begin();
  for (const Cut& from : source) {
    const std::size_t first = entries.size();
    for (;; ++to) {
      const Index begin = std::max(from.begin, to->begin), end = std::min(from.end, to->end);
      entries.push_back({from.part,
                         to->part,
                         {begin, end, from.at + begin - from.begin, to->at + begin - to->begin, from.add, to->add,
                          static_cast<Index>(entries.size() - first), 1}});
      if (to->end >= from.end) break;
    }
    if (to->end == from.end) ++to;
    for (std::size_t i = first; i < entries.size(); ++i)
      entries[i].overlap.turns = static_cast<Index>(entries.size() - first);
  }
  Overlay overlay;
  overlay.into_.assign(entries, &Entry::to_part);
  overlay.out_of_.assign(entries, &Entry::from_part);
  return overlay;
}

void Overlay::Lists::assign(const std::vector<Entry>& entries, Index Entry::*part) {
  Index parts = 0;
  for (const Entry& entry : entries) parts = std::max(parts, entry.*part + 1);
  first_.assign(static_cast<std::size_t>(parts) + 1, 0);
  for (const Entry& entry : entries) ++first_[static_cast<std::size_t>(entry.*part) + 1];
  for (std::size_t i = 1; i < first_.size(); ++i) first_[i] += first_[i - 1];
  overlaps_.resize(entries.size());
  std::vector<std::size_t> next = first_;
  for (const Entry& entry : entries) overlaps_[next[static_cast<std::size_t>(entry.*part)]++] = entry.overlap;
}

std::span<const Overlap> Overlay::Lists::of(Index part) const {
  const auto p = static_cast<std::size_t>(part);
  if (p + 1 >= first_.size()) return {};
  return std::span(overlaps_).subspan(first_[p], first_[p + 1] - first_[p]);
}

}  // namespace reshard
