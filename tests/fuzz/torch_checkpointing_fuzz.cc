// Fuzzes metadata.pkl of torch_checkpointing: accepted metadata names files inside the step and meshes of its ranks,
// and is equal after writing and reading it.
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

#include "formats/torch_checkpointing/metadata.h"
#include "lib/base/checked.h"
#include "lib/base/text.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"

namespace reshard::torch_checkpointing_fuzz {

using namespace reshard::torch_checkpointing;

namespace {

void check(const StoredPlacement& h, Index world_size) {
  const auto elements = checked_volume(h.shape);
  require(elements && checked_mul(*elements, byte_size(h.dtype)).has_value());
  require(h.placements.size() == h.mesh->sizes.size());
  Index ranks = 1;
  for (const Index n : h.mesh->sizes) ranks *= n;
  require(ranks == static_cast<Index>(h.mesh->ranks.size()));
  require(std::set<Index>(h.mesh->ranks.begin(), h.mesh->ranks.end()).size() == h.mesh->ranks.size());
  for (const Index rank : h.mesh->ranks) require(rank >= 0 && rank < world_size);
  for (const AxisPlacement& p : h.placements)
    require(p.kind == AxisPlacement::Kind::kReplicate || (p.dim >= 0 && p.dim < h.shape.rank() && p.split_factor >= 1));
}

void require_same(const Item& a, const Item& b) {
  require(a.files == b.files && a.tensors.size() == b.tensors.size());
  for (std::size_t i = 0; i < a.tensors.size(); ++i) {
    require(a.tensors[i].name == b.tensors[i].name);
    const bool is_alone = (i == 0 || a.tensors[i - 1].name != a.tensors[i].name) &&
                          (i + 1 == a.tensors.size() || a.tensors[i + 1].name != a.tensors[i].name);
    if (!is_alone) continue;  // several paths have this name when joined
    require(a.tensors[i].path == b.tensors[i].path);
    const auto &x = a.tensors[i].holdings, &y = b.tensors[i].holdings;
    require(x.size() == y.size());
    for (std::size_t k = 0; k < x.size(); ++k)
      require(x[k].dtype == y[k].dtype && x[k].shape == y[k].shape && x[k].mesh->ranks == y[k].mesh->ranks &&
              x[k].mesh->sizes == y[k].mesh->sizes && x[k].is_replicated() == y[k].is_replicated());
  }
}

}  // namespace

FUZZ_TARGET(torch_checkpointing)(const std::uint8_t* data, std::size_t size) {
  const auto read = parse_metadata(std::string(reinterpret_cast<const char*>(data), size), "input");
  if (!read) {
    require(!read.error().message().empty());
    return 0;
  }
  Index files = 0;
  for (const auto& [name, item] : read->items) {
    files += static_cast<Index>(item.files.size());
    for (const std::string& file : item.files) require(is_safe_relative_path(file));
    for (const ItemTensor& tensor : item.tensors)
      for (const StoredPlacement& h : tensor.holdings) check(h, read->world_size);
  }
  require(files <= static_cast<Index>(size));
  const auto again = parse_metadata(write_metadata(*read), "again");
  require(again.has_value() && again->world_size == read->world_size && again->items.size() == read->items.size());
  for (const auto& [name, item] : read->items) {
    require(again->items.contains(name));
    require_same(item, again->items.at(name));
  }
  return 0;
}

}  // namespace reshard::torch_checkpointing_fuzz
