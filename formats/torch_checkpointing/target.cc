// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <numeric>

#include "formats/tensor_files/local_files.h"
#include "formats/torch_checkpointing/metadata.h"
#include "formats/torch_checkpointing/torch_checkpointing.h"
#include "lib/base/text.h"

namespace reshard::torch_checkpointing {
namespace {

constexpr std::string_view kOptimizerPrefix = "optimizer.";

// Returns the item of a tensor, and its name there.
std::pair<std::string, std::string> item_of(const std::string& name) {
  if (name.starts_with(kOptimizerPrefix)) return {"optimizer", name.substr(kOptimizerPrefix.size())};
  return {std::string(kModelItem), name};
}

// The device mesh of a stage, or of all ranks. Mesh axes that FSDP cuts together become one axis.
struct Axes {
  std::shared_ptr<DeviceMesh> mesh = std::make_shared<DeviceMesh>();
  std::vector<std::vector<std::string>> names;  // for each axis, the axes of the request's mesh
};

Axes axes_of(const Mesh& mesh, Index stage) {
  Axes out;
  for (const MeshAxis& axis : mesh.axes()) {
    if (axis.name == "pp" && stage >= 0) continue;
    if (axis.name == "cp" && !out.names.empty() && out.names.back() == std::vector<std::string>{"dp_shard"}) {
      out.names.back().emplace_back("cp");
      out.mesh->names.back() = "dp_shard_cp";
      out.mesh->sizes.back() *= axis.size;
      continue;
    }
    out.names.push_back({axis.name});
    out.mesh->names.push_back(axis.name);
    out.mesh->sizes.push_back(axis.size);
  }
  if (out.names.empty()) {
    out.names.push_back({});
    out.mesh->names.emplace_back("dp_shard");
    out.mesh->sizes.push_back(1);
  }
  for (Index rank = 0; rank < mesh.ranks(); ++rank)
    if (stage < 0 || mesh.coordinate(rank, "pp") == stage) out.mesh->ranks.push_back(rank);
  return out;
}

// Returns whether the loader gives every rank the rows that fully_shard cut for it, if `size` rows are cut into `first`
// parts and each of these into `second`. The loader computes a rank's rows by another formula, which differs from
// fully_shard's for uneven parts (torch/distributed/tensor/_utils.py).
bool is_cut_alike(Index size, Index first, Index second) {
  const auto length = [](const Interval& part) { return part.end - part.begin; };
  for (Index k = 0; k < second; ++k) {
    std::vector<Index> parts;
    for (Index i = 0; i < first; ++i) parts.push_back(length(chunk(length(chunk(size, first, i)), second, k)));
    const Index all = std::accumulate(parts.begin(), parts.end(), Index{0});
    for (Index i = 0; i < first; ++i)
      if (length(chunk(all, first, i)) != parts[i]) return false;
  }
  return true;
}

// Returns the placements of the splits. If two splits cut a dimension, and the later one is by an axis further left, it
// is a StridedShard.
Result<std::vector<AxisPlacement>> placements_of(const TargetTensor& t, const Axes& axes, const Mesh& mesh) {
  std::vector<AxisPlacement> out(axes.names.size());
  std::map<int, std::size_t> cut_by;  // the axis that cut each dimension
  for (const Split& split : t.placement->splits) {
    std::vector<std::string> cutting;
    for (const std::string& name : split.axes)
      if (mesh.size(name) > 1) cutting.push_back(name);
    if (cutting.empty()) continue;
    const auto refuse = [&](const std::string& why) {
      return unsupported(tensor_text(t.name) + ": is cut " + to_string(t.placement->splits) + ", " + why);
    };
    const auto axis = std::find_if(axes.names.begin(), axes.names.end(), [&](const std::vector<std::string>& names) {
      return std::all_of(cutting.begin(), cutting.end(),
                         [&](const std::string& c) { return std::find(names.begin(), names.end(), c) != names.end(); });
    });
    if (split.groups != 1) return refuse("in sections; DTensor has no such placement");
    const std::size_t i = axis - axes.names.begin();
    Index size = 1;
    for (const std::string& c : cutting) size *= mesh.size(c);
    if (axis == axes.names.end() || size != axes.mesh->sizes[i] || out[i].kind != AxisPlacement::Kind::kReplicate)
      return refuse("not along whole axes of a device mesh");
    out[i].kind = AxisPlacement::Kind::kShard;
    out[i].dim = split.dim;
    const auto [before, is_first] = cut_by.emplace(split.dim, i);
    if (is_first) continue;
    if (before->second > i) {
      out[i].kind = AxisPlacement::Kind::kStridedShard;
      out[i].split_factor = axes.mesh->sizes[before->second];
      if (!is_cut_alike(t.shape[split.dim], out[i].split_factor, size))
        return refuse("and torch's loader would put some of its " + count_of(t.shape[split.dim], "row") +
                      " elsewhere (" + std::to_string(out[i].split_factor) + " and " + count_of(size, "rank") +
                      " do not divide them); choose a --mesh that divides them, or --to dcp");
    }
    before->second = axes.names.size();  // no axis: a third cut cannot be expressed
  }
  const auto is_cut_often = [&](const auto& cut) { return cut.second == axes.names.size(); };
  if (std::any_of(cut_by.begin(), cut_by.end(), is_cut_often)) {
    Index cuts = 0;
    for (const auto& [dim, last] : cut_by)
      cuts = std::max<Index>(cuts, std::count_if(out.begin(), out.end(), [&, d = dim](const AxisPlacement& p) {
                               return p.kind != AxisPlacement::Kind::kReplicate && p.dim == d;
                             }));
    if (cuts > 2)
      return unsupported(tensor_text(t.name) + ": is cut " + to_string(t.placement->splits) +
                         ", three times along one dimension, which torch_checkpointing cannot express");
  }
  return out;
}

// Returns the parts of these tensors that a rank holds.
std::vector<LocalTensor> held_by(const LayoutRequest& request, const std::vector<std::size_t>& tensors, Index rank) {
  std::vector<LocalTensor> out;
  for (const std::size_t i : tensors) {
    const TargetTensor& t = request.tensors[i];
    const auto boxes = owned_boxes(request.mesh, t.placement, t.shape, rank);
    if (boxes.empty()) continue;  // a tensor of another stage
    LocalTensor local{item_of(t.name).second, t.dtype, local_shape(boxes), {}};
    for (const LocalBox& box : boxes) local.parts.push_back({i, box});
    out.push_back(std::move(local));
  }
  return out;
}

}  // namespace

Result<std::unique_ptr<Target>> lay_out(LayoutRequest request) {
  if (!request.blobs.empty())
    return internal_error("safetensors hold tensors only: got object '" + printable(request.blobs.front().name) + "'");
  request.container = Container::kSafetensors;
  Metadata metadata;
  metadata.world_size = request.mesh.ranks();
  std::map<Index, Axes> axes;  // by stage
  std::map<std::string, std::vector<std::size_t>> tensors;
  for (std::size_t i = 0; i < request.tensors.size(); ++i) {
    const TargetTensor& t = request.tensors[i];
    const Index stage = request.mesh.size("pp") > 1 ? t.placement->stage : -1;
    auto on = axes.find(stage);
    if (on == axes.end()) on = axes.emplace(stage, axes_of(request.mesh, stage)).first;
    auto placements = TRY(placements_of(t, on->second, request.mesh));
    StoredPlacement holding{t.dtype, t.shape, on->second.mesh, std::move(placements)};
    const auto [item, name] = item_of(t.name);
    metadata.items[item].tensors.push_back({{name}, name, {std::move(holding)}});
    tensors[item].push_back(i);
  }
  const auto kept = std::make_shared<const LayoutRequest>(std::move(request));
  LocalFiles files(*kept);
  for (auto& [name, item] : metadata.items) {
    const auto numbers = std::make_shared<const std::vector<std::size_t>>(std::move(tensors[name]));
    for (Index rank = 0; rank < metadata.world_size; ++rank) {
      item.files.push_back(safetensors_file(name, rank));
      TRY(files.add_file(item.files.back(), [kept, numbers, rank] { return held_by(*kept, *numbers, rank); }));
    }
  }
  files.target().add_text(std::string(kMetadataFile), write_metadata(metadata));
  return std::move(files).finish();
}

}  // namespace reshard::torch_checkpointing
