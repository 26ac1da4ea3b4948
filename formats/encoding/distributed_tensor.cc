// SPDX-License-Identifier: Apache-2.0
#include "formats/encoding/distributed_tensor.h"

#include <algorithm>
#include <utility>

#include "lib/base/text.h"
#include "lib/layout/layout.h"

namespace reshard {
namespace {

using pickle::Kind;
using pickle::Value;

constexpr std::size_t kMaxAxes = 16;

// Returns the value inside the wrapping of a Parameter.
Value unwrap_parameter(Value v) {
  for (int depth = 0; depth < 4 && v.kind() == Kind::kObject; ++depth) {
    const Value callee = v.callee();
    const bool is_wrapper = callee.is_global("torch._utils", "_rebuild_parameter") ||
                            callee.is_global("torch._utils", "_rebuild_parameter_with_state");
    if (!is_wrapper || v.args().size() < 1) break;
    v = v.args()[0];
  }
  return v;
}

bool is_class_of_torch_distributed(Value type, std::string_view name) {
  return type.kind() == Kind::kGlobal && type.name() == name && type.module().starts_with("torch.distributed");
}

// Returns an object's attributes: its state, or if that is a pair (None, slots), the slots.
std::optional<Value> attributes_of(Value object) {
  Value state = object.state();
  if (state.kind() == Kind::kTuple && state.size() == 2) state = state[state[1].kind() == Kind::kDict ? 1 : 0];
  if (state.kind() != Kind::kDict) return std::nullopt;
  return state;
}

std::optional<Value> attribute(Value object, std::string_view name) {
  const auto all = attributes_of(object);
  return all ? all->find(name) : std::nullopt;
}

Result<Value> needed(Value object, std::string_view what, std::string_view name) {
  if (const auto value = attribute(object, name)) return *value;
  return object.mismatch(what, "an object with '" + std::string(name) + "'");
}

Result<std::vector<Index>> read_numbers(Value v, std::string_view what, std::size_t most) {
  if (!v.is_sequence() || v.size() > most)
    return v.mismatch(what, "a list or tuple of at most " + std::to_string(most) + " numbers");
  std::vector<Index> out;
  for (std::size_t i = 0; i < v.size(); ++i) {
    const auto n = v[i].as_int();
    if (!n || *n < 0) return v[i].mismatch(what, "an integer of 0 or more");
    out.push_back(*n);
  }
  return out;
}

Result<Dims> read_sizes(Value v, std::string_view what) {
  const auto numbers = TRY(read_numbers(v, what, std::size_t{kMaxRank}));
  return Dims(std::span<const Index>(numbers));
}

// The common part of the two wrappings.
struct Wrapper {
  Value type;
  Value arguments;  // class, dtype, size, stride, ...
  Value state;
};

std::optional<Wrapper> wrapper_of(Value value) {
  const Value v = unwrap_parameter(value);
  if (v.kind() != Kind::kObject || !v.callee().is_global("torch._tensor", "_rebuild_from_type_v2")) return std::nullopt;
  const Value args = v.args();
  if (args.size() < 4 || !args[0].is_global("torch._utils", "_rebuild_wrapper_subclass")) return std::nullopt;
  return Wrapper{args[1], args[2], args[3]};
}

// ---- Meshes

// Reads the number of ranks along an axis: a number, or the numbers of the axes from which it was flattened.
Result<Index> axis_size(Value v) {
  Index out = 1;
  std::vector<Value> ahead = {v};
  for (std::size_t i = 0; i < ahead.size(); ++i) {
    const Value part = ahead[i];
    if (part.is_sequence() && part.size() <= kMaxAxes && ahead.size() <= kMaxAxes) {
      for (std::size_t k = 0; k < part.size(); ++k) ahead.push_back(part[k]);
      continue;
    }
    const auto n = part.as_int();
    const auto product = n && *n >= 1 ? checked_mul(out, *n) : std::nullopt;
    if (!product || *product > kMaxMeshRanks)
      return part.mismatch("mesh axis", "a size from 1 to " + with_commas(kMaxMeshRanks));
    out = *product;
  }
  return out;
}

// Reads a mesh. torch 2.5 and 2.6 store the tensor of ranks, which has the mesh's shape; 2.15 stores a layout.
Result<std::vector<Index>> mesh_sizes(const TorchFile& file, Value mesh) {
  std::vector<Index> out;
  if (const auto ranks = attribute(mesh, "mesh"); ranks && makes_torch_tensor(*ranks)) {
    const StoredTensor tensor = TRY(file.resolve(*ranks).context("mesh"));
    out.assign(tensor.shape().begin(), tensor.shape().end());
    return out;
  }
  const Value layout = TRY(needed(mesh, "device mesh", "_layout"));
  auto axes = attribute(layout, "axes");
  const bool has_axes = axes.has_value();
  if (!axes) axes = attribute(layout, "shape");
  if (!axes || !axes->is_sequence() || axes->size() > kMaxAxes)
    return layout.mismatch("mesh layout", "at most " + std::to_string(kMaxAxes) + " axes");
  for (std::size_t i = 0; i < axes->size(); ++i)
    out.push_back(TRY(axis_size(has_axes ? TRY(needed((*axes)[i], "mesh axis", "shape")) : (*axes)[i])));
  return out;
}

Result<RankMesh> read_mesh(const TorchFile& file, Value mesh) {
  RankMesh out;
  out.sizes = TRY(mesh_sizes(file, mesh));
  for (const Index n : out.sizes) {
    const auto product = n >= 1 ? checked_mul(out.ranks, n) : std::nullopt;
    if (!product || *product > kMaxMeshRanks)
      return mesh.mismatch("device mesh", "axes of 1 to " + with_commas(kMaxMeshRanks) + " ranks together");
    out.ranks = *product;
  }
  const Value coordinate = TRY(needed(mesh, "device mesh", "_coordinate_on_dim"));
  if (!coordinate.is_none()) {
    out.coordinate = TRY(read_numbers(coordinate, "coordinate", kMaxAxes));
    const auto& c = *out.coordinate;
    bool fits = c.size() == out.sizes.size();
    for (std::size_t i = 0; fits && i < c.size(); ++i) fits = c[i] < out.sizes[i];
    if (!fits)
      return coordinate.mismatch("coordinate", "a place in a mesh of " + std::to_string(out.sizes.size()) + " axes");
  }
  // The names in 2.15 and in 2.6.
  for (const std::string_view name : {"_mesh_dim_names", "mesh_dim_names"})
    if (const auto names = attribute(mesh, name); names && names->is_sequence() && names->size() == out.sizes.size())
      for (std::size_t i = 0; i < names->size(); ++i)
        out.names.push_back(printable((*names)[i].as_string().value_or("?")));
  for (const std::string_view name : {"_flatten_rank_map", "_flatten_mesh_list"})
    if (const auto all = attribute(mesh, name); all && all->is_sequence())
      out.ranks = std::max(out.ranks, std::min(std::ssize(*all), kMaxMeshRanks));
  if (const auto rank = attribute(mesh, "_rank")) out.rank = rank->as_int();
  return out;
}

std::string mesh_text(const RankMesh& mesh) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < mesh.sizes.size(); ++i)
    parts.push_back((mesh.names.size() == mesh.sizes.size() ? mesh.names[i] + "=" : "") +
                    std::to_string(mesh.sizes[i]));
  return join(parts, ", ");
}

// ---- Placements

Result<std::vector<AxisPlacement>> read_placements(Value v, int rank, std::size_t axes) {
  if (!v.is_sequence() || v.size() != axes)
    return v.mismatch("placements", "one for each of the mesh's " + std::to_string(axes) + " axes");
  std::vector<AxisPlacement> out;
  for (std::size_t i = 0; i < v.size(); ++i) {
    const Value callee = v[i].callee();
    const std::string_view name = v[i].kind() == Kind::kObject ? callee.name() : std::string_view();
    AxisPlacement p;
    if (name == "Shard" || name == "_StridedShard") {
      p.kind = name == "Shard" ? AxisPlacement::Kind::kShard : AxisPlacement::Kind::kStridedShard;
      const auto dim = TRY(needed(v[i], "placement", "dim")).as_int();
      if (!dim || *dim < -rank || *dim >= rank)
        return v[i].mismatch("placement", "one of the tensor's " + count_of(rank, "dimension"));
      p.dim = static_cast<int>(*dim < 0 ? *dim + rank : *dim);
    } else if (name != "Replicate") {
      Error other = v[i].mismatch("placement", "Shard, _StridedShard or Replicate");
      return name.empty() ? other : unsupported(other.message() + ": the ranks do not hold parts of the tensor");
    }
    if (p.kind == AxisPlacement::Kind::kStridedShard) {
      const auto factor = TRY(needed(v[i], "placement", "split_factor")).as_int();
      if (!factor || *factor < 1) return v[i].mismatch("placement", "a split_factor of 1 or more");
      p.split_factor = *factor;
    }
    out.push_back(p);
  }
  return out;
}

std::string placements_text(const std::vector<AxisPlacement>& placements) {
  std::vector<std::string> parts;
  for (const AxisPlacement& p : placements) {
    if (p.kind == AxisPlacement::Kind::kReplicate) {
      parts.emplace_back("Replicate");
    } else {
      parts.push_back(std::string(p.kind == AxisPlacement::Kind::kShard ? "Shard(" : "_StridedShard(") +
                      std::to_string(p.dim) + ")");
    }
  }
  return join(parts, ", ");
}

std::string axis_name(std::size_t axis) { return std::to_string(axis); }

Status check_size(const Dims& shape, DType dtype, Value where) {
  const auto elements = checked_volume(shape);
  if (elements && checked_mul(*elements, byte_size(dtype))) return {};
  return where.mismatch("tensor size", "fewer than 2^63 bytes");
}

// Sets this rank's parts from the local tensor and the rank's box.
Status add_part(DistributedTensor& tensor, StoredTensor local, const Box& box, const std::string& place) {
  const bool is_empty = volume(local.shape()) == 0;
  if (local.dtype != tensor.dtype)
    return corrupt(place + ": tensor: expected a local part of torch." + std::string(info(tensor.dtype).torch_name) +
                   ", got torch." + std::string(info(local.dtype).torch_name));
  if (local.shape() != box.shape && !(is_empty && box.empty()))
    return corrupt(place + ": tensor: expected a local part of " + to_string(box.shape) + ", which is " +
                   to_string(box) + " of " + to_string(tensor.shape) + " (" + tensor.layout() + "), got " +
                   to_string(local.shape()));
  if (is_empty && volume(tensor.shape) > 0) return {};
  local.box = is_empty ? whole(tensor.shape) : box;
  if (is_empty) local.strides = row_major_strides(tensor.shape);
  tensor.parts.push_back(std::move(local));
  return {};
}

// ---- The two kinds

Status resolve_sharded(const TorchFile& file, Value state, DistributedTensor& out) {
  if (state.kind() != Kind::kTuple || state.size() < 3 || !state[0].is_sequence())
    return state.mismatch("ShardedTensor", "(local shards, metadata, process group, ...)");
  const auto number = [&](std::string_view name) -> std::optional<Index> {
    const auto value = attribute(state[2], name);
    const auto n = value ? value->as_int() : std::nullopt;
    return n && *n >= 0 && *n <= kMaxMeshRanks ? n : std::nullopt;
  };
  out.rank = number("global_rank");
  out.ranks = number("global_world_size").value_or(1);
  out.shard = number("local_rank").value_or(0);
  out.shards = number("local_world_size").value_or(0);
  for (std::size_t i = 0; i < state[0].size(); ++i) {
    const Value shard = state[0][i];
    const Value metadata = TRY(needed(shard, "shard", "metadata"));
    Box box;
    box.origin = TRY(read_sizes(TRY(needed(metadata, "shard", "shard_offsets")), "shard offsets"));
    box.shape = TRY(read_sizes(TRY(needed(metadata, "shard", "shard_sizes")), "shard sizes"));
    bool fits = box.origin.rank() == out.shape.rank() && box.shape.rank() == out.shape.rank();
    for (int d = 0; fits && d < out.shape.rank(); ++d) fits = fits_inside(box.origin[d], box.shape[d], out.shape[d]);
    if (!fits) return metadata.mismatch("shard", "a box inside " + to_string(out.shape));
    TRY(add_part(out, TRY(file.resolve(TRY(needed(shard, "shard", "tensor")))), box, file.place()));
  }
  return {};
}

}  // namespace

Result<Placement> placement_of(const std::vector<AxisPlacement>& placements, const std::vector<Index>& sizes,
                               int rank) {
  using Cut = AxisPlacement::Kind;
  Placement out;
  for (int d = 0; d < rank; ++d) {
    const auto is = [&](std::size_t i, Cut kind) { return placements[i].kind == kind && placements[i].dim == d; };
    for (std::size_t i = 0; i < placements.size(); ++i)
      if (is(i, Cut::kShard)) out.splits.push_back({{axis_name(i)}, d});
    Index later = 1, later_shards = 1;  // number of ranks along the later axes that cut this dimension
    for (std::size_t i = placements.size(); i-- > 0;) {
      if (is(i, Cut::kShard)) {
        later *= sizes[i];
        later_shards *= sizes[i];
      }
      if (!is(i, Cut::kStridedShard)) continue;
      // Another factor interleaves rows and is not a cut into contiguous pieces.
      const Index factor = placements[i].split_factor;
      if (factor != later && factor != later_shards)
        return unsupported("placements: expected a split_factor of " + std::to_string(later) +
                           ", the shards that were made before, got " + std::to_string(factor));
      out.splits.push_back({{axis_name(i)}, d});
      later *= sizes[i];
    }
  }
  return out;
}

Mesh mesh_of_sizes(const std::vector<Index>& sizes) {
  std::vector<MeshAxis> axes;
  for (std::size_t i = 0; i < sizes.size(); ++i) axes.push_back({axis_name(i), sizes[i]});
  return Mesh(std::move(axes));
}

std::string DistributedTensor::layout() const {
  return mesh ? placements_text(placements) + " on " + mesh_text(*mesh) : "shards on " + count_of(shards, "rank");
}

bool makes_distributed_tensor(Value value) {
  const auto wrapper = wrapper_of(value);
  return wrapper && (is_class_of_torch_distributed(wrapper->type, "DTensor") ||
                     is_class_of_torch_distributed(wrapper->type, "ShardedTensor"));
}

Result<std::shared_ptr<const RankMesh>> DistributedTensors::mesh_of(Value mesh) {
  if (const auto known = meshes_.find(mesh.identity()); known != meshes_.end()) return known->second;
  auto read = std::make_shared<const RankMesh>(TRY(read_mesh(file_, mesh)));
  return meshes_.emplace(mesh.identity(), std::move(read)).first->second;
}

Status DistributedTensors::resolve_dtensor(Value state, DistributedTensor& out) {
  if (state.kind() != Kind::kTuple || state.size() != 2 || state[1].kind() != Kind::kDict)
    return state.mismatch("DTensor", "(None, {'_local_tensor', '_spec'})");
  const auto local = state[1].find("_local_tensor"), spec = state[1].find("_spec");
  if (!local || !spec) return state.mismatch("DTensor", "(None, {'_local_tensor', '_spec'})");
  out.mesh = TRY(mesh_of(TRY(needed(*spec, "DTensor's spec", "mesh"))));
  const RankMesh& mesh = *out.mesh;
  const Value where = TRY(needed(*spec, "DTensor's spec", "placements"));
  out.placements = TRY(read_placements(where, out.shape.rank(), mesh.sizes.size()));
  const Placement placement = TRY(placement_of(out.placements, mesh.sizes, out.shape.rank()).context(file_.place()));
  out.ranks = mesh.ranks;
  out.rank = mesh.rank;
  Index number = 0;  // row-major number of the coordinate in the mesh
  for (std::size_t i = 0; i < mesh.sizes.size(); ++i) {
    if (!mesh.coordinate) continue;
    number = number * mesh.sizes[i] + (*mesh.coordinate)[i];
    if (placement.splits.size() != 1 || out.placements[i].kind == AxisPlacement::Kind::kReplicate) continue;
    out.shards = mesh.sizes[i];
    out.shard = (*mesh.coordinate)[i];
  }
  if (!mesh.coordinate) return {};
  const auto boxes = owned_boxes(mesh_of_sizes(mesh.sizes), placement, out.shape, number);
  return add_part(out, TRY(file_.resolve(*local)), boxes.front().box, file_.place());
}

Result<DistributedTensor> DistributedTensors::resolve(Value value) {
  const auto wrapper = wrapper_of(value);
  if (!wrapper) return value.mismatch("tensor", "a DTensor or ShardedTensor");
  const Value arguments = wrapper->arguments;
  if (arguments.kind() != Kind::kTuple || arguments.size() < 4)
    return arguments.mismatch("distributed tensor", "(class, dtype, size, stride, ...)");
  const Value type = arguments[1];
  const auto dtype =
      type.kind() == Kind::kGlobal && type.module() == "torch" ? dtype_from_torch(type.name()) : std::nullopt;
  if (!dtype) return unsupported(file_.place() + ": tensor: dtype " + pickle::print(type) + " is not supported");
  DistributedTensor out;
  out.dtype = *dtype;
  out.shape = TRY(read_sizes(arguments[2], "tensor size"));
  TRY(check_size(out.shape, out.dtype, arguments[2]));
  const bool is_dtensor = wrapper->type.name() == "DTensor";
  TRY(is_dtensor ? resolve_dtensor(wrapper->state, out) : resolve_sharded(file_, wrapper->state, out));
  return out;
}

}  // namespace reshard
