// SPDX-License-Identifier: Apache-2.0
#include "formats/torch_checkpointing/metadata.h"

#include <algorithm>
#include <functional>
#include <set>

#include "formats/encoding/pickle_writer.h"
#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/base/text.h"

namespace reshard::torch_checkpointing {
namespace {

using pickle::Kind;
using pickle::Value;

Result<Value> member(Value dict, std::string_view key) {
  if (dict.kind() != Kind::kDict) return dict.mismatch("'" + std::string(key) + "'", "a dict around it");
  const auto found = dict.find(key);
  if (!found) return dict.mismatch("'" + std::string(key) + "'", "it in the dict");
  return *found;
}

Result<std::vector<Index>> numbers(Value v, std::string_view what, std::size_t most) {
  if (!v.is_sequence() || v.size() > most) return v.mismatch(what, "at most " + std::to_string(most) + " numbers");
  std::vector<Index> out;
  out.reserve(v.size());
  for (std::size_t i = 0; i < v.size(); ++i) {
    const auto n = v[i].as_int();
    if (!n || *n < 0) return v[i].mismatch(what, "a number of 0 or more");
    out.push_back(*n);
  }
  return out;
}

// The parser. It caches values that several descriptions share through the pickle's memo, so that each is read once.
class Parser {
 public:
  Parser(const std::string& path, std::size_t bytes) : path_(path), bytes_(bytes) {}

  Result<Metadata> parse(Value root) {
    if (root.kind() != Kind::kDict) return root.mismatch("metadata", "a dict");
    const auto version = root.find("version");
    const std::string_view said = version ? version->as_string().value_or("") : kFlatVersion;
    if (said != kVersion && said != kFlatVersion)
      return unsupported(path_ + ": version: expected '" + std::string(kVersion) + "' or '" +
                         std::string(kFlatVersion) + "', got " + pickle::print(*version));
    Metadata out;
    const Value size = TRY(member(root, "world_size"));
    const auto ranks = size.as_int();
    if (!ranks || *ranks < 1 || *ranks > kMaxMeshRanks)
      return size.mismatch("world_size", "1 to " + with_commas(kMaxMeshRanks) + " ranks");
    out.world_size = world_size_ = *ranks;
    const Value items = TRY(member(root, "metadata"));
    if (items.kind() != Kind::kDict) return items.mismatch("metadata", "a dict of items");
    TRY(said == kVersion ? read_items(items, out)
                         : read_flat(items, TRY(member(root, "rank_to_layout_info_mappings")), out));
    std::set<std::string> files;
    for (auto& [name, item] : out.items) {
      for (const std::string& file : item.files)
        if (!files.insert(file).second)
          return corrupt(path_ + ": rank_to_layout_info: file '" + printable(file) + "' occurs twice");
      std::sort(item.tensors.begin(), item.tensors.end(),
                [](const ItemTensor& a, const ItemTensor& b) { return natural_less(a.name, b.name); });
    }
    return out;
  }

 private:
  Status read_items(Value items, Metadata& out) {
    for (std::size_t i = 0; i < items.size(); ++i) {
      const auto name = items.key(i).as_string();
      if (!name || !is_safe_relative_path(*name)) return items.key(i).mismatch("metadata", "the name of an item");
      Item& item = out.items[std::string(*name)];
      TRY(read_item(std::string(*name), items.value(i), item).context("item '" + printable(*name) + "'"));
    }
    return {};
  }

  // Reads version 1.0: each path begins with the item's name, and each rank has a layout for each item.
  Status read_flat(Value tensors, Value layouts, Metadata& out) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto key = tensors.key(i).as_string();
      if (!key) return tensors.key(i).mismatch("metadata", "a path as text");
      KeyPath path = TRY(read_path(*key));
      const auto* name = path.empty() ? nullptr : std::get_if<std::string>(&path.front());
      if (!name || !is_safe_relative_path(*name))
        return tensors.key(i).mismatch("metadata", "a path that begins with the name of an item");
      Item& item = out.items[*name];
      path.erase(path.begin());
      item.tensors.push_back(TRY(read_tensor(std::move(path), tensors.value(i)).context("'" + printable(*key) + "'")));
    }
    for (auto& [name, item] : out.items) {
      const auto of_item = [&name = name](Value of_rank) { return of_rank.find(name); };
      TRY(read_layout(name, layouts, of_item, item).context("item '" + printable(name) + "'"));
    }
    return {};
  }

  // Reads the name of each rank's file. `of_item` finds the item's layout in the layouts of a rank.
  template <class OfItem>
  Status read_layout(const std::string& name, Value layout, const OfItem& of_item, Item& out) {
    if (layout.kind() != Kind::kDict) return layout.mismatch("rank_to_layout_info", "a dict");
    if (std::ssize(layout) != world_size_)
      return layout.mismatch("rank_to_layout_info", "each of the " + count_of(world_size_, "rank"));
    // A value that is shared through the pickle's memo may occur in any number of items.
    files_ += world_size_;
    if (files_ > bytes_) return layout.mismatch("rank_to_layout_info", "fewer files than the pickle has bytes");
    out.files.resize(world_size_);
    for (std::size_t i = 0; i < layout.size(); ++i) {
      const Value key = layout.key(i);
      const auto rank = key.kind() == Kind::kString ? parse_number(*key.as_string()) : key.as_int();
      if (!rank || *rank < 0 || *rank >= world_size_ || !out.files[*rank].empty())
        return key.mismatch("rank_to_layout_info", "each rank once");
      std::string file = default_file(name, *rank);
      if (const std::optional<Value> said = of_item(layout.value(i)); said && !said->is_none()) {
        const Value path = TRY(member(*said, "file_path"));
        const auto text = path.as_string();
        if (!text || !is_safe_relative_path(*text)) return path.mismatch("file_path", "a file inside the step");
        file = std::string(*text);
      }
      out.files[*rank] = std::move(file);
    }
    return {};
  }

  Status read_item(const std::string& name, Value v, Item& out) {
    const auto itself = [](Value of_rank) { return std::optional(of_rank); };
    TRY(read_layout(name, TRY(member(v, "rank_to_layout_info")), itself, out));
    const Value tensors = TRY(member(v, "nested_path_to_metadata"));
    if (tensors.kind() != Kind::kDict) return tensors.mismatch("nested_path_to_metadata", "a dict");
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto key = tensors.key(i).as_string();
      if (!key) return tensors.key(i).mismatch("nested_path_to_metadata", "a path as text");
      auto tensor = read_tensor(TRY(read_path(*key)), tensors.value(i));
      out.tensors.push_back(TRY(std::move(tensor).context("'" + printable(*key) + "'")));
    }
    return {};
  }

  // Parses a path in JSON: '["state",0,"exp_avg"]'.
  Result<KeyPath> read_path(std::string_view text) const {
    KeyPath out;
    const Json path = TRY(parse_json(text, path_));
    for (const Json& part : TRY(path.as_array().context(path_))) {
      if (part.is_integer())
        out.emplace_back(TRY(part.as_index().context(path_)));
      else
        out.emplace_back(std::string(TRY(part.as_string().context(path_))));
    }
    return out;
  }

  Result<ItemTensor> read_tensor(KeyPath path, Value groups) {
    ItemTensor out;
    out.path = std::move(path);
    for (const auto& part : out.path) {
      if (!out.name.empty()) out.name += '.';
      out.name +=
          std::holds_alternative<Index>(part) ? std::to_string(std::get<Index>(part)) : std::get<std::string>(part);
    }
    if (!groups.is_sequence() || groups.size() == 0) return groups.mismatch("tensor", "one entry or more");
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const Value sharding = TRY(member(groups[i], "sharding_metadata"));
      const Value type = TRY(member(sharding, "type"));
      if (type.as_string() != "DTensorShardingMetadata")
        return unsupported(type.mismatch("type", "'DTensorShardingMetadata'").message());
      out.holdings.push_back(TRY(read_holding(TRY(member(sharding, "data")))));
      if (out.holdings.back().shape != out.holdings.front().shape ||
          out.holdings.back().dtype != out.holdings.front().dtype)
        return groups[i].mismatch("global_shape", to_string(out.holdings.front().shape) + " as on another mesh");
    }
    return out;
  }

  Result<StoredPlacement> read_holding(Value data) {
    StoredPlacement out;
    const Value shape = TRY(member(data, "global_shape")), dtype = TRY(member(data, "dtype"));
    for (const Index n : TRY(numbers(shape, "global_shape", kMaxRank))) out.shape.push_back(n);
    constexpr std::string_view kTorch = "torch.";
    const auto text = dtype.as_string();
    const auto known = text && text->starts_with(kTorch) ? dtype_from_torch(text->substr(kTorch.size())) : std::nullopt;
    if (!known) return unsupported(dtype.mismatch("dtype", "a supported dtype").message());
    out.dtype = *known;
    const auto elements = checked_volume(out.shape);
    if (!elements || !checked_mul(*elements, byte_size(out.dtype)))
      return shape.mismatch("global_shape", "fewer than 2^63 bytes");
    out.mesh = TRY(read_mesh(TRY(member(data, "mesh_spec"))));
    const Value placements = TRY(member(data, "placements"));
    if (!placements.is_sequence() || placements.size() != out.mesh->sizes.size())
      return placements.mismatch("placements",
                                 "one for each of the mesh's " + std::to_string(out.mesh->sizes.size()) + " axes");
    for (std::size_t i = 0; i < placements.size(); ++i)
      out.placements.push_back(TRY(read_placement(placements[i], out.shape.rank())));
    return out;
  }

  Result<AxisPlacement> read_placement(Value v, int rank) {
    AxisPlacement out;
    const Value type = TRY(member(v, "type"));
    if (type.as_string() == "Replicate") return out;
    out.kind = AxisPlacement::Kind::kShard;
    if (type.as_string() == "StridedShard") {
      out.kind = AxisPlacement::Kind::kStridedShard;
      const Value factor = TRY(member(v, "split_factor"));
      if (factor.as_int().value_or(0) < 1) return factor.mismatch("split_factor", "1 or more");
      out.split_factor = *factor.as_int();
    } else if (type.as_string() != "Shard") {
      return unsupported(type.mismatch("placement", "Shard, StridedShard or Replicate").message());
    }
    const Value dim = TRY(member(v, "dim"));
    const auto d = dim.as_int();
    if (!d || *d < -rank || *d >= rank) return dim.mismatch("dim", "one of " + count_of(rank, "dimension"));
    out.dim = static_cast<int>(*d < 0 ? *d + rank : *d);
    return out;
  }

  Result<std::shared_ptr<const DeviceMesh>> read_mesh(Value v) {
    if (const auto known = meshes_.find(v.identity()); known != meshes_.end()) return known->second;
    DeviceMesh out;
    constexpr std::size_t kMaxAxes = 16;
    const Value sizes = TRY(member(v, "mesh_shape")), ranks = TRY(member(v, "mesh_data"));
    out.sizes = TRY(numbers(sizes, "mesh_shape", kMaxAxes));
    out.ranks = TRY(numbers(ranks, "mesh_data", world_size_));
    Index product = 1;
    for (const Index n : out.sizes) product = n < 1 || n > kMaxMeshRanks || product > kMaxMeshRanks ? 0 : product * n;
    if (product != std::ssize(out.ranks) || product < 1)
      return ranks.mismatch("mesh_data", "the ranks of a mesh of this mesh_shape");
    std::set<Index> different(out.ranks.begin(), out.ranks.end());
    if (different.size() != out.ranks.size() || *different.rbegin() >= world_size_)
      return ranks.mismatch("mesh_data", "ranks of " + std::to_string(world_size_) + ", each once");
    if (const auto names = v.find("mesh_dim_names"); names && names->is_sequence())
      for (std::size_t i = 0; i < names->size(); ++i)
        if (const auto name = (*names)[i].as_string()) out.names.emplace_back(*name);
    return meshes_.emplace(v.identity(), std::make_shared<const DeviceMesh>(std::move(out))).first->second;
  }

  const std::string& path_;
  Index bytes_, files_ = 0;  // size of the pickle; number of files that it names
  Index world_size_ = 0;
  std::map<std::uint32_t, std::shared_ptr<const DeviceMesh>> meshes_;
};

}  // namespace

bool StoredPlacement::is_replicated() const {
  return std::all_of(placements.begin(), placements.end(),
                     [](const AxisPlacement& p) { return p.kind == AxisPlacement::Kind::kReplicate; });
}

Result<Metadata> parse_metadata(std::string bytes, const std::string& path) {
  const std::size_t size = bytes.size();
  const pickle::Document document = TRY(pickle::parse(std::move(bytes), path));
  return Parser(path, size).parse(document.root());
}

std::string default_file(std::string_view item, Index rank) {
  return std::string(item) + "_" + std::to_string(rank) + ".pt";
}

std::string safetensors_file(std::string_view item, Index rank) {
  return std::string(item) + "_" + std::to_string(rank) + ".safetensors";
}

namespace {

class Writer {
 public:
  std::string write(const Metadata& metadata) && {
    dict([&] {
      key("metadata");
      dict([&] {
        for (const auto& [name, item] : metadata.items) {
          key(name);
          write_item(item);
        }
      });
      key("world_size");
      w_.integer(metadata.world_size);
      key("version");
      w_.text(kVersion);
    });
    return std::move(w_).finish();
  }

 private:
  void key(std::string_view text) { w_.shared_text(text); }
  void dict(const std::function<void()>& members) {
    w_.empty_dict();
    w_.mark();
    members();
    w_.set_items();
  }
  void word(std::string_view name, std::string_view text) {
    key(name);
    w_.shared_text(text);
  }

  void write_item(const Item& item) {
    dict([&] {
      key("nested_path_to_metadata");
      w_.empty_dict();
      pickle::ElementRuns tensors(w_, &pickle::PickleWriter::set_items);
      for (const ItemTensor& t : item.tensors) {
        Json path = Json::array();
        for (const auto& part : t.path)
          path.push_back(std::holds_alternative<Index>(part) ? Json(std::get<Index>(part))
                                                             : Json(std::get<std::string>(part)));
        tensors.next();
        w_.text(to_text(path));
        w_.empty_list();
        w_.mark();
        for (const StoredPlacement& holding : t.holdings) write_holding(holding);
        w_.append_items();
      }
      tensors.end();
      key("rank_to_layout_info");
      w_.empty_dict();
      pickle::ElementRuns ranks(w_, &pickle::PickleWriter::set_items);
      for (std::size_t rank = 0; rank < item.files.size(); ++rank) {
        ranks.next();
        w_.integer(rank);
        dict([&] {
          key("file_path");
          w_.text(item.files[rank]);
          key("serialization_format");
          dict([&] { word("type", "SafetensorsSerialization"); });
        });
      }
      ranks.end();
    });
  }

  void numbers(std::span<const Index> values) {
    w_.empty_list();
    w_.mark();
    for (const Index n : values) w_.integer(n);
    w_.append_items();
  }

  void write_holding(const StoredPlacement& h) {
    dict([&] {
      key("sharding_metadata");
      dict([&] {
        word("type", "DTensorShardingMetadata");
        key("data");
        dict([&] {
          key("global_shape");
          numbers(h.shape.span());
          word("dtype", "torch." + std::string(info(h.dtype).torch_name));
          key("stride");
          numbers(row_major_strides(h.shape).span());
          key("mesh_spec");
          write_mesh(*h.mesh);
          key("placements");
          w_.empty_list();
          w_.mark();
          for (const AxisPlacement& p : h.placements) write_placement(p);
          w_.append_items();
        });
      });
      key("ranks");
      std::vector<Index> ranks = h.mesh->ranks;
      std::sort(ranks.begin(), ranks.end());
      w_.integers(ranks);
    });
  }

  void write_placement(const AxisPlacement& p) {
    using Cut = AxisPlacement::Kind;
    dict([&] {
      word("type", p.kind == Cut::kReplicate ? "Replicate" : p.kind == Cut::kShard ? "Shard" : "StridedShard");
      if (p.kind == Cut::kReplicate) return;
      key("dim");
      w_.integer(p.dim);
      if (p.kind == Cut::kShard) return;
      key("split_factor");
      w_.integer(p.split_factor);
    });
  }

  void write_mesh(const DeviceMesh& mesh) {
    if (const auto known = meshes_.find(&mesh); known != meshes_.end()) return w_.get(known->second);
    dict([&] {
      word("device_type", "cuda");
      key("mesh_shape");
      w_.integers(mesh.sizes);
      key("mesh_data");
      w_.integers(mesh.ranks);
      key("mesh_dim_names");
      w_.mark();
      for (const std::string& name : mesh.names) w_.text(name);
      w_.tuple_from_mark();
    });
    meshes_.emplace(&mesh, w_.put());
  }

  pickle::PickleWriter w_;
  std::map<const DeviceMesh*, std::uint32_t> meshes_;
};

}  // namespace

std::string write_metadata(const Metadata& metadata) { return Writer().write(metadata); }

}  // namespace reshard::torch_checkpointing
