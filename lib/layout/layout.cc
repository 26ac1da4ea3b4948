#include "lib/layout/layout.h"

#include <array>
#include <charconv>

#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr std::array<std::string_view, 5> kRankOrder = {"pp", "dp_replicate", "dp_shard", "cp", "tp"};
constexpr Index kMaxRanks = 1'000'000;

}  // namespace

Result<Mesh> Mesh::parse(std::string_view text) {
  std::array<Index, kRankOrder.size()> sizes{};
  for (const std::string& part : split(text, ',')) {
    const std::size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    const auto known = std::find(kRankOrder.begin(), kRankOrder.end(), name);
    if (equals == std::string::npos || known == kRankOrder.end())
      return usage_error("mesh '" + printable(text) +
                         "': expected axis=size with axes pp, dp_replicate, dp_shard, cp, " + "tp, got '" +
                         printable(part) + "'");
    Index size = 0;
    const char* end = part.data() + part.size();
    const auto parsed = std::from_chars(part.data() + equals + 1, end, size);
    if (parsed.ec != std::errc() || parsed.ptr != end || size < 1 || size > kMaxRanks)
      return usage_error("mesh axis '" + name + "': expected a size from 1 to " + with_commas(kMaxRanks) + ", got '" +
                         printable(part.substr(equals + 1)) + "'");
    Index& slot = sizes[static_cast<std::size_t>(known - kRankOrder.begin())];
    if (slot != 0) return usage_error("mesh axis '" + name + "' is given twice");
    slot = size;
  }
  std::vector<MeshAxis> axes;
  Index ranks = 1;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] <= 1) continue;
    axes.push_back({std::string(kRankOrder[i]), sizes[i]});
    ranks = checked_mul(ranks, sizes[i]).value_or(kMaxRanks + 1);
    if (ranks > kMaxRanks)
      return usage_error("mesh '" + printable(text) + "': expected at most " + with_commas(kMaxRanks) + " ranks");
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

std::optional<Box> owned(const Mesh& mesh, const Placement& placement, const Dims& shape, Index rank) {
  if (placement.stage >= 0 && mesh.size("pp") > 1 && mesh.coordinate(rank, "pp") != placement.stage)
    return std::nullopt;
  Box box = whole(shape);
  for (const Split& s : placement.splits) {
    Index pieces = 1, mine = 0;
    for (const std::string& axis : s.axes) {
      pieces *= mesh.size(axis);
      mine = mine * mesh.size(axis) + mesh.coordinate(rank, axis);
    }
    const Interval piece = chunk(box.shape[s.dim], pieces, mine);
    box.origin[s.dim] += piece.begin;
    box.shape[s.dim] = piece.end - piece.begin;
  }
  for (int d = 0; d < shape.rank(); ++d)
    if (box.shape[d] == 0) box.origin[d] = shape[d];
  return box;
}

bool is_first_replica(const Mesh& mesh, const Placement& placement, Index rank) {
  for (const MeshAxis& axis : mesh.axes()) {
    if (axis.name == "pp" && placement.stage >= 0) continue;
    const bool cut = std::any_of(placement.splits.begin(), placement.splits.end(), [&](const Split& s) {
      return std::find(s.axes.begin(), s.axes.end(), axis.name) != s.axes.end();
    });
    if (!cut && mesh.coordinate(rank, axis.name) != 0) return false;
  }
  return true;
}

}  // namespace reshard
