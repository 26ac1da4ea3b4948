// SPDX-License-Identifier: Apache-2.0
#include "lib/layout/layout.h"

#include <numeric>

#include "lib/base/choices.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

// The intervals of one dimension that a rank holds, in the order of the local tensor.
using Runs = std::vector<Interval>;

Index length(const Runs& runs) {
  return std::accumulate(runs.begin(), runs.end(), Index{0}, [](Index n, Interval i) { return n + i.end - i.begin; });
}

// Appends the part [wanted.begin, wanted.end) of the local dimension that `runs` form.
void take(const Runs& runs, Interval wanted, Runs& out) {
  Index start = 0;  // of the run, in the local dimension
  for (const Interval& run : runs) {
    const Index size = run.end - run.begin;
    const Index begin = std::max<Index>(wanted.begin - start, 0), end = std::min(wanted.end - start, size);
    start += size;
    if (begin >= end) continue;
    const Interval part{run.begin + begin, run.begin + end};
    if (!out.empty() && out.back().end == part.begin)
      out.back().end = part.end;
    else
      out.push_back(part);
  }
}

// Returns the k-th of n pieces of each of `groups` sections.
Runs cut(const Runs& runs, Index groups, Index n, Index k) {
  Runs out;
  const Index size = length(runs);
  for (Index g = 0; g < groups; ++g) {
    const Interval section = chunk(size, groups, g);
    const Interval piece = chunk(section.end - section.begin, n, k);
    take(runs, {section.begin + piece.begin, section.begin + piece.end}, out);
  }
  return out;
}

// Returns all combinations of the dimensions' runs; the last dimension varies fastest.
std::vector<LocalBox> combine(const std::vector<Runs>& dims) {
  std::vector<LocalBox> boxes(1);
  for (const Runs& runs : dims) {
    std::vector<LocalBox> longer;
    longer.reserve(boxes.size() * runs.size());
    for (const LocalBox& outer : boxes) {
      Index at = 0;
      for (const Interval& run : runs) {
        LocalBox b = outer;
        b.box.origin.push_back(run.begin);
        b.box.shape.push_back(run.end - run.begin);
        b.at.push_back(at);
        at += run.end - run.begin;
        longer.push_back(b);
      }
    }
    boxes = std::move(longer);
  }
  return boxes;
}

}  // namespace

Result<Mesh> Mesh::parse(std::string_view text) {
  std::array<Index, kMeshAxes.size()> sizes{};
  for (const std::string& part : split(text, ',')) {
    const std::size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    const auto known = std::find(kMeshAxes.begin(), kMeshAxes.end(), name);
    if (equals == std::string::npos || known == kMeshAxes.end()) {
      const std::vector<std::string> names(kMeshAxes.begin(), kMeshAxes.end());
      const std::string meant = known == kMeshAxes.end() ? near_name(name, names) : "";
      return usage_error("mesh '" + printable(text) + "': expected axis=size with axes " + join(names, ", ") +
                         ", got '" + printable(part) + "'" + meant);
    }
    const Index size = parse_number(std::string_view(part).substr(equals + 1)).value_or(0);
    if (size < 1 || size > kMaxMeshRanks)
      return usage_error("mesh axis '" + name + "': expected a size from 1 to " + with_commas(kMaxMeshRanks) +
                         ", got '" + printable(part.substr(equals + 1)) + "'");
    Index& slot = sizes[known - kMeshAxes.begin()];
    if (slot != 0) return usage_error("mesh axis '" + name + "' is given twice");
    slot = size;
  }
  std::vector<MeshAxis> axes;
  Index ranks = 1;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] <= 1) continue;
    axes.push_back({std::string(kMeshAxes[i]), sizes[i]});
    ranks = checked_mul(ranks, sizes[i]).value_or(kMaxMeshRanks + 1);
    if (ranks > kMaxMeshRanks)
      return usage_error("mesh '" + printable(text) + "': expected at most " + with_commas(kMaxMeshRanks) + " ranks");
  }
  return Mesh(std::move(axes));
}

Index Mesh::ranks() const {
  Index n = 1;
  for (const MeshAxis& axis : axes_) n *= axis.size;
  return n;
}

Index Mesh::size(std::string_view axis) const {
  for (const MeshAxis& a : axes_)
    if (a.name == axis) return a.size;
  return 1;
}

Index Mesh::coordinate(Index rank, std::string_view axis) const {
  for (auto a = axes_.rbegin(); a != axes_.rend(); ++a) {
    if (a->name == axis) return rank % a->size;
    rank /= a->size;
  }
  return 0;
}

Mesh Mesh::without(std::string_view axis) const {
  Mesh out = *this;
  std::erase_if(out.axes_, [&](const MeshAxis& a) { return a.name == axis; });
  return out;
}

std::string Mesh::to_string() const {
  std::vector<std::string> parts;
  for (const MeshAxis& axis : axes_) parts.push_back(axis.name + "=" + std::to_string(axis.size));
  return parts.empty() ? "one rank" : join(parts, ", ");
}

Interval chunk(Index size, Index n, Index k) {
  const Index piece = ceil_div(size, n);
  const auto border = [&](Index i) { return std::min(size, checked_mul(i, piece).value_or(size)); };
  return {border(k), border(k + 1)};
}

const std::shared_ptr<const Placement>& SharedPlacement::whole() {
  static const auto placement = std::make_shared<const Placement>();
  return placement;
}

std::string to_string(const std::vector<Split>& splits) {
  std::vector<std::string> parts;
  for (const Split& s : splits)
    parts.push_back("dim " + std::to_string(s.dim) +
                    (s.groups > 1 ? " in " + std::to_string(s.groups) + " sections" : "") + " by " +
                    join(s.axes, " x "));
  return parts.empty() ? "whole" : join(parts, ", then ");
}

std::vector<LocalBox> owned_boxes(const Mesh& mesh, const Placement& placement, const Dims& shape, Index rank) {
  if (placement.stage >= 0 && mesh.size("pp") > 1 && mesh.coordinate(rank, "pp") != placement.stage) return {};
  std::vector<Runs> dims;
  for (const Index extent : shape) dims.push_back({{0, extent}});
  for (const Split& s : placement.splits) {
    Index pieces = 1, mine = 0;
    for (const std::string& axis : s.axes) {
      pieces *= mesh.size(axis);
      mine = mine * mesh.size(axis) + mesh.coordinate(rank, axis);
    }
    Runs& runs = dims[s.dim];
    runs = cut(runs, s.groups, pieces, mine);
  }
  for (int d = 0; d < shape.rank(); ++d) {
    Runs& runs = dims[d];
    if (length(runs) == 0) runs = {{shape[d], shape[d]}};
  }
  return combine(dims);
}

std::optional<Box> owned(const Mesh& mesh, const Placement& placement, const Dims& shape, Index rank) {
  const std::vector<LocalBox> boxes = owned_boxes(mesh, placement, shape, rank);
  if (boxes.empty()) return std::nullopt;
  return boxes[0].box;
}

Dims local_shape(const std::vector<LocalBox>& boxes) {
  Dims shape = boxes.front().box.shape;
  for (const LocalBox& b : boxes)
    for (int d = 0; d < shape.rank(); ++d) shape[d] = std::max(shape[d], b.at[d] + b.box.shape[d]);
  return shape;
}

namespace {

bool replicates(const MeshAxis& axis, const Placement& placement) {
  if (axis.name == "pp" && placement.stage >= 0) return false;
  return std::none_of(placement.splits.begin(), placement.splits.end(), [&](const Split& s) {
    return std::find(s.axes.begin(), s.axes.end(), axis.name) != s.axes.end();
  });
}

}  // namespace

Index first_replica(const Mesh& mesh, const Placement& placement, Index rank) {
  Index first = 0;
  for (const MeshAxis& axis : mesh.axes())
    first = first * axis.size + (replicates(axis, placement) ? 0 : mesh.coordinate(rank, axis.name));
  return first;
}

bool is_first_replica(const Mesh& mesh, const Placement& placement, Index rank) {
  return first_replica(mesh, placement, rank) == rank;
}

std::vector<Index> replica_steps(const Mesh& mesh, const Placement& placement) {
  std::vector<Index> steps = {0};
  Index stride = mesh.ranks();
  for (const MeshAxis& axis : mesh.axes()) {
    stride /= axis.size;
    if (!replicates(axis, placement)) continue;
    const std::size_t outer = steps.size();
    for (Index k = 1; k < axis.size; ++k)
      for (std::size_t i = 0; i < outer; ++i) steps.push_back(steps[i] + k * stride);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

}  // namespace reshard
