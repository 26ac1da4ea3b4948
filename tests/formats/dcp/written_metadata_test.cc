// Reads back random metadata as reshard writes it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "formats/dcp/metadata.h"
#include "tests/formats/dcp/metadata_cases.h"
#include "tests/support/dcp_metadata.h"

namespace reshard::written_metadata_test {
namespace {

using namespace metadata_cases;
using testing::IsEmpty;

struct Written {
  std::vector<TargetTensor> tensors;
  std::vector<dcp::WrittenEntry> entries;
  std::vector<std::string> files;
};

class RandomMetadata {
 public:
  explicit RandomMetadata(unsigned seed) : random_(seed) {}

  // Entries point to tensors, so the result may be moved but not copied.
  Written make() {
    Written out;
    const Index files = 1 + below(4);
    for (Index i = 0; i < files; ++i) out.files.push_back("d/__" + std::to_string(i) + "_0.distcp");
    const auto n = static_cast<std::size_t>(below(12));
    out.tensors.resize(n);
    for (std::size_t i = 0; i < n; ++i) {
      dcp::WrittenEntry entry;
      entry.name = name(static_cast<Index>(i));
      entry.path = path();
      if (below(4) > 0) {
        TargetTensor& tensor = out.tensors[i];
        tensor.name = entry.name;
        tensor.dtype = static_cast<DType>(below(static_cast<Index>(DType::kComplex128) + 1));
        std::vector<Box> boxes = cut(tensor.shape);
        std::shuffle(boxes.begin(), boxes.end(), random_);
        for (const Box& box : boxes) entry.items.push_back(item(box, files));
        entry.tensor = &tensor;
      } else {
        entry.items.push_back(item({}, files));
      }
      out.entries.push_back(std::move(entry));
    }
    return out;
  }

 private:
  Index below(Index n) { return std::uniform_int_distribution<Index>(0, n - 1)(random_); }

  std::string name(Index i) {
    const char* const parts[] = {"layers.", "ü", " ", "_orig_mod.", "\n", "'", "weight"};
    std::string out = std::to_string(i);  // so that no two are equal
    for (Index k = below(5); k > 0; --k) out += parts[below(7)];
    return out;
  }
  KeyPath path() {
    KeyPath out;
    for (Index k = below(4); k > 0; --k) {
      if (below(2) == 0)
        out.emplace_back(below(Index{1} << 40));
      else
        out.emplace_back(name(k));
    }
    return out;
  }
  dcp::WrittenItem item(const Box& box, Index files) {
    return {box, static_cast<std::uint32_t>(below(files)), below(Index{1} << 45), below(Index{1} << (1 + below(40)))};
  }
  // Cuts a shape into a grid of boxes.
  std::vector<Box> cut(Dims& shape) {
    std::vector<Box> boxes = {Box{}};
    for (Index rank = below(kMaxRank + 1); rank > 0; --rank) {
      std::vector<Box> next;
      Index begin = 0;
      for (Index pieces = boxes.size() > 50 ? 1 : 1 + below(3); pieces > 0; --pieces) {
        const Index extent = 1 + below(300);
        for (Box box : boxes) {
          box.origin.push_back(begin);
          box.shape.push_back(extent);
          next.push_back(box);
        }
        begin += extent;
      }
      if (boxes.size() == 1 && below(20) == 0) {  // an empty tensor has one item
        next = {boxes[0]};
        next[0].origin.push_back(0);
        next[0].shape.push_back(0);
        begin = 0;
      }
      shape.push_back(begin);
      boxes = std::move(next);
      if (begin == 0 || volume(shape) > (Index{1} << 40)) break;
    }
    return boxes;
  }

  std::mt19937 random_;
};

TEST_F(DcpMetadataTest, ReadsBackWhatIsWritten) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Written written = RandomMetadata(seed).make();
    write(dcp::write_metadata(written.entries, written.files));
    const Catalog& c = catalog(false);
    std::size_t tensors = 0, blobs = 0;
    for (const dcp::WrittenEntry& entry : written.entries) {
      std::vector<std::string> items;
      for (const dcp::WrittenItem& i : entry.items)
        items.push_back(to_string(i.box) + " in " + written.files[i.file] + " at " + std::to_string(i.offset) + ", " +
                        std::to_string(i.length) + " bytes");
      const KeyPath path = entry.path.empty() ? KeyPath{entry.name} : entry.path;
      if (entry.tensor) {
        ++tensors;
        const auto found = c.find(entry.name);
        ASSERT_TRUE(found) << entry.name;
        const Tensor& t = c.tensors()[*found];
        EXPECT_EQ(t.dtype, entry.tensor->dtype);
        EXPECT_EQ(t.shape, entry.tensor->shape);
        EXPECT_EQ(t.path, path);
        EXPECT_EQ(shown(c, t.fragments), items);
        EXPECT_TRUE(t.replicas.empty());
      } else {
        const auto blob =
            std::find_if(c.blobs.begin(), c.blobs.end(), [&](const Blob& b) { return b.name == entry.name; });
        ASSERT_NE(blob, c.blobs.end()) << entry.name;
        ++blobs;
        EXPECT_EQ(blob->path, path);
        Fragment stored;
        stored.extent = blob->extent;
        EXPECT_EQ(shown(c, stored), items[0]);
      }
    }
    EXPECT_EQ(c.tensors().size(), tensors);
    EXPECT_EQ(c.blobs.size(), blobs);
    EXPECT_THAT(c.warnings, IsEmpty());
    if (HasFailure()) break;
  }
}

}  // namespace
}  // namespace reshard::written_metadata_test
