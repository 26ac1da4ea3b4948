#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "formats/dcp/dcp.h"
#include "formats/encoding/torch_archive.h"
#include "lib/layout/layout.h"

namespace reshard::dcp_target_test {
namespace {

// Returns a request with many similar tensors, on a mesh of up to 12 ranks.
LayoutRequest random_request(std::mt19937& rng) {
  const auto number = [&](unsigned n) { return static_cast<Index>(rng() % n); };
  LayoutRequest out;
  out.mesh = Mesh({{"dp_shard", 1 + number(6)}, {"tp", 1 + number(2)}});
  std::vector<TargetTensor> kinds;
  for (Index k = 1 + number(4); k > 0; --k) {
    TargetTensor t;
    for (Index d = number(4); d > 0; --d) t.shape.push_back(rng() % 8 == 0 ? 0 : 1 + number(9));
    if (t.shape.rank() > 0) {
      const int last = t.shape.rank() - 1;
      Placement placement;
      if (rng() % 3 != 0) placement.splits.push_back({{"dp_shard"}, static_cast<int>(number(2)) * last, 1});
      if (rng() % 2 == 0) placement.splits.push_back({{"tp"}, last, 1});
      t.placement = placement;
    }
    kinds.push_back(t);
  }
  for (Index b = number(3); b > 0; --b) {
    const std::string name = "blob" + std::to_string(b);
    out.blobs.push_back({name, {name}, std::string(rng() % 200, 'x')});
  }
  for (int i = 0; i < 12; ++i) {
    TargetTensor t = kinds[rng() % kinds.size()];
    t.name = "t" + std::to_string(i);
    t.dtype = rng() % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
    out.tensors.push_back(t);
  }
  return out;
}

TEST(DcpTarget, RanksFilesHoldTheirBoxesOneAfterTheOther) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    const LayoutRequest request = random_request(rng);
    const auto target = dcp::lay_out(request);
    ASSERT_TRUE(target) << target.error().message();
    const Catalog& catalog = (*target)->catalog();

    // Computes the position of every box as if each were placed individually.
    std::map<std::uint32_t, Index> sizes;
    for (const TargetBlob& blob : request.blobs) sizes[0] += std::ssize(blob.bytes);
    for (std::size_t i = 0; i < request.tensors.size(); ++i) {
      const TargetTensor& wanted = request.tensors[i];
      const FragmentList& fragments = catalog.tensors()[i].fragments;
      EXPECT_EQ(catalog.tensors()[i].name, wanted.name);
      std::size_t at = 0;
      for (std::uint32_t rank = 0; rank < request.mesh.ranks(); ++rank) {
        if (!is_first_replica(request.mesh, wanted.placement, rank)) continue;
        for (const LocalBox& owned : owned_boxes(request.mesh, wanted.placement, wanted.shape, rank)) {
          const bool is_empty_tensor = volume(wanted.shape) == 0;
          if (is_empty_tensor ? at > 0 : owned.box.empty()) continue;
          const Box box = is_empty_tensor ? whole(wanted.shape) : owned.box;
          const torch_archive::Item item(wanted.dtype, box.shape, sizes[rank]);
          ASSERT_LT(at, fragments.size());
          EXPECT_EQ(fragments.box(at), box);
          EXPECT_EQ(fragments.extent(at), (Extent{rank, sizes[rank] + item.header_bytes(), item.payload_bytes()}));
          sizes[rank] += item.total();
          ++at;
        }
      }
      EXPECT_EQ(at, fragments.size());
    }

    // The emitted bytes and the payloads together are all bytes of every file, each once.
    using Stretch = std::pair<Index, Index>;
    std::map<std::uint32_t, std::vector<Stretch>> stretches;
    std::map<std::pair<std::uint32_t, Index>, std::string> sealed;
    for (const Tensor& t : catalog.tensors())
      for (std::size_t k = 0; k < t.fragments.size(); ++k) {
        const Extent& e = t.fragments.extent(k);
        if (e.length > 0) stretches[e.file].emplace_back(e.offset, e.offset + e.length);
      }
    const auto crc = [](const Extent& e) { return static_cast<std::uint32_t>(e.offset); };
    const auto emit = [&](std::uint32_t file, Index offset, Bytes bytes) -> Status {
      if (!bytes.empty()) stretches[file].emplace_back(offset, offset + std::ssize(bytes));
      sealed[{file, offset}] = std::string(as_string(bytes));
      return {};
    };
    ASSERT_TRUE((*target)->seal(crc, emit));
    for (std::uint32_t f = 0; f < catalog.files.size(); ++f) {
      std::sort(stretches[f].begin(), stretches[f].end());
      Index at = 0;
      for (const auto& [begin, end] : stretches[f]) {
        EXPECT_EQ(begin, at) << catalog.files[f].path;
        at = end;
      }
      EXPECT_EQ(at, catalog.files[f].size) << catalog.files[f].path;
    }

    // Requests for a range give the same bytes.
    for (int i = 0; i < 10; ++i) {
      const auto f = static_cast<std::uint32_t>(rng() % catalog.files.size());
      if (catalog.files[f].size == 0) continue;
      const Index begin = static_cast<Index>(rng()) % catalog.files[f].size,
                  length = 1 + static_cast<Index>(rng() % 99);
      std::set<std::pair<std::uint32_t, Index>> seen;
      ASSERT_TRUE(
          (*target)->seal_at({f, begin, length}, crc, [&](std::uint32_t file, Index offset, Bytes bytes) -> Status {
            seen.emplace(file, offset);
            EXPECT_EQ(sealed.at({file, offset}), as_string(bytes));
            return {};
          }));
      for (const auto& [place, bytes] : sealed)
        if (place.first == f && place.second < begin + length && begin < place.second + std::ssize(bytes)) {
          EXPECT_TRUE(seen.contains(place));
        }
    }
  }
}

}  // namespace
}  // namespace reshard::dcp_target_test
