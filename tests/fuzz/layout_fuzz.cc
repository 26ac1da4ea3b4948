// Fuzzes layout descriptors: accepted ones are equal after writing and reading them, and compute the placement
// of tensors.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "lib/layout/descriptor.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"

namespace reshard::layout_fuzz {
namespace {

void ask(const LayoutDescriptor& layout) {
  for (const std::string_view name : {"layers.3.attention.wq.weight", "tok_embeddings.weight", "output.weight", "a"}) {
    for (const Dims& shape : {Dims{}, Dims{7}, Dims{64, 48}, Dims{INT64_MAX, 1}, Dims{0, 3}}) {
      for (const Index layers : {Index{0}, Index{4}, kMaxLayers}) {
        const auto placement = layout.place(name, shape, layers);
        if (const auto in_files = layout.place_in_files(name, shape, layers); placement) require(in_files.has_value());
        if (!placement) continue;
        require(placement->stage < layout.mesh->size("pp"));
        for (const Index rank : {Index{0}, layout.mesh->ranks() - 1})
          for (const LocalBox& owned : owned_boxes(*layout.mesh, *placement, shape, rank))
            require(contains(whole(shape), owned.box));
      }
    }
  }
  if (!layout.vocabulary) return;
  for (const Index rows : {Index{0}, Index{32000}, INT64_MAX})
    if (const auto padded = layout.padded_rows(rows)) require(*padded >= 0);
}

}  // namespace

FUZZ_TARGET(layout)(const std::uint8_t* data, std::size_t size) {
  const auto layout = LayoutDescriptor::parse({reinterpret_cast<const char*>(data), size}, "input");
  if (!layout) {
    require(!layout.error().message().empty());
    return 0;
  }
  const auto again = LayoutDescriptor::parse(to_text(layout->to_json(), 1), "written");
  require(again && *again == *layout);
  if (layout->mesh) {
    ask(*layout);
  } else if (const auto meshed = layout->with_mesh(*Mesh::parse("pp=2,dp_shard=3,tp=4"))) {
    ask(*meshed);
  }
  return 0;
}

}  // namespace reshard::layout_fuzz
