// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <memory>

#include "formats/ranks/ranks.h"
#include "formats/tensor_files/local_files.h"
#include "lib/base/text.h"
#include "lib/infer/rank_layout.h"

namespace reshard::ranks {
namespace {

std::string file_name(Index rank, Container container) {
  char name[32];
  std::snprintf(name, sizeof name, "rank-%05lld", static_cast<long long>(rank));
  return name + std::string(container_extension(container));
}

std::vector<LocalTensor> held_by(const LayoutRequest& request, Index rank) {
  std::vector<LocalTensor> out;
  for (std::size_t i = 0; i < request.tensors.size(); ++i) {
    const TargetTensor& t = request.tensors[i];
    const auto boxes = owned_boxes(request.mesh, t.placement, t.shape, rank);
    if (boxes.empty()) continue;  // a tensor of another stage
    LocalTensor local{t.name, t.dtype, local_shape(boxes), {}};
    for (const LocalBox& box : boxes) local.parts.push_back({i, box});
    out.push_back(std::move(local));
  }
  return out;
}

Result<std::string> descriptor(const LayoutRequest& request) {
  std::vector<NamedPlacement> placements;
  for (const TargetTensor& t : request.tensors) {
    if (t.name.empty())
      return unsupported("a tensor's name is empty, and " + std::string(kLayoutFile) +
                         " cannot name it; choose another format with --to");
    placements.push_back({t.name, t.placement});
  }
  const std::string name = request.layout ? request.layout->name : request.mesh.to_string();
  LayoutDescriptor layout = TRY(describe_placements(request.mesh, placements, name));
  layout.description = "The part of each tensor that a rank's file holds.";
  return to_text(layout.to_json(), 1) + "\n";
}

}  // namespace

Result<std::unique_ptr<Target>> lay_out(LayoutRequest request) {
  if (!request.blobs.empty())
    return internal_error("per-rank files hold tensors only: got object '" + printable(request.blobs.front().name) +
                          "'");
  std::string layout = TRY(descriptor(request));
  const auto kept = std::make_shared<const LayoutRequest>(std::move(request));
  LocalFiles files(*kept);
  for (Index rank = 0; rank < kept->mesh.ranks(); ++rank)
    TRY(files.add_file(file_name(rank, kept->container), [kept, rank] { return held_by(*kept, rank); }));
  files.target().add_text(std::string(kLayoutFile), std::move(layout));
  return std::move(files).finish();
}

}  // namespace reshard::ranks
