// Tests boxes of packed weights: each equals that box of the whole weight, which tests/cli/unpacking_test.cc compares
// with the libraries.
#include "lib/convert/weights/packed_matrix.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "formats/open.h"
#include "lib/convert/weights/unpacking.h"
#include "tests/support/checkpoints.h"
#include "tests/support/must.h"

namespace reshard::packed_matrix_test {
namespace {

TEST(PackedMatrix, ReadsFieldsAcrossWords) {
  const std::vector<std::uint32_t> words = {0xC0000001U, 0xFFFF0002U, 0x80000000U};
  EXPECT_EQ(bit_field(words.data(), 1, 0, 3), 1U);
  EXPECT_EQ(bit_field(words.data(), 1, 30, 3), 3U);
  EXPECT_EQ(bit_field(words.data(), 1, 30, 8), 0x0BU);
  EXPECT_EQ(bit_field(words.data(), 1, 32, 8), 2U);
  EXPECT_EQ(bit_field(words.data(), 1, 92, 4), 8U);
  EXPECT_EQ(bit_field(words.data(), 2, 63, 1), 1U);
}

TEST(PackedMatrix, TellsBitsByShapes) {
  for (unsigned bits = 1; bits <= 8; ++bits) {
    EXPECT_EQ(bits_of(4096, 128 * Index{bits}), bits);
    EXPECT_EQ(bits_of(33, ceil_div(33 * Index{bits}, 32)), bits);
  }
  EXPECT_EQ(bits_of(8, 1), std::nullopt);  // 1 to 4 bits
  EXPECT_EQ(bits_of(4096, 1), std::nullopt);
  EXPECT_EQ(bits_of(0, 0), std::nullopt);
  EXPECT_EQ(bits_of(Index{1} << 62, 1), std::nullopt);
}

// A packed checkpoint, as a conversion sees it.
struct Opened {
  explicit Opened(const std::string& path) : reader(must(open_checkpoint(path)).reader) {
    Request wanted;
    wanted.typing.dtype = DType::kFloat32;
    wanted.model = {false, nullptr};
    ConfigFile config = must(find_config_file(*reader));
    ConversionNotes notes;
    unpacking = must(Unpacking::make(*reader, wanted, 1, config, notes));
    packed.emplace(reader->catalog(), reader->files());
    stored.emplace(unpacking->catalog(), reader->files());
    plain.emplace(unpacking->catalog(), *stored);
    unpacking->set(*packed, *stored, *plain);
  }
  std::vector<float> read(std::size_t tensor, const Box& box) {
    std::vector<std::byte> scratch(1 << 16);
    return must(read_floats(*plain, tensor, box, scratch));
  }

  std::unique_ptr<Reader> reader;
  std::unique_ptr<Unpacking> unpacking;
  std::optional<FileSource> packed, stored;
  std::optional<ComputedSource> plain;
};

TEST(PackedMatrix, GivesAnyBoxOfAWeight) {
  int weights = 0;
  for (const auto& entry : std::filesystem::directory_iterator(test_data("quantized"))) {
    if (!std::filesystem::exists(entry.path() / "config.json")) continue;
    Opened opened(entry.path());
    const auto& tensors = opened.unpacking->catalog().tensors();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const Dims& shape = tensors[i].shape;
      if (shape.rank() != 2) continue;
      ++weights;
      const std::vector<float> all = opened.read(i, whole(shape));
      for (const Index columns : {Index{1}, Index{3}, Index{17}})
        for (Index row = 0; row < shape[0]; row += 3)
          for (Index column = 0; column < shape[1]; column += 5) {
            const Box box{{row, column}, {std::min<Index>(2, shape[0] - row), std::min(columns, shape[1] - column)}};
            std::vector<float> expected;
            for (Index r = row; r < box.end(0); ++r)
              for (Index c = column; c < box.end(1); ++c)
                expected.push_back(all[static_cast<std::size_t>(r * shape[1] + c)]);
            ASSERT_EQ(opened.read(i, box), expected) << entry.path() << " " << tensors[i].name << " " << to_string(box);
          }
    }
  }
  EXPECT_GT(weights, 40);
}

}  // namespace
}  // namespace reshard::packed_matrix_test
