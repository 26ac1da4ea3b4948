// What devices are given of files. Reads through the page cache and past it give the same bytes, wherever they begin
// and end.
#include "lib/engine/direct_reader.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <random>

#include "formats/registry.h"
#include "lib/device/copy.h"
#include "lib/engine/tensor_source.h"
#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

constexpr Index kUnit = File::kDirectUnit;

struct Memory {
  explicit Memory(Index bytes)
      : data(static_cast<std::byte*>(std::aligned_alloc(kUnit, static_cast<std::size_t>(DirectReader::end_of(bytes))))),
        size(DirectReader::end_of(bytes)) {}
  ~Memory() { std::free(data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  MutableBytes bytes() const { return {data, static_cast<std::size_t>(size)}; }
  std::byte* data;
  Index size;
};

TEST(DirectReader, PlacesPiecesInUnitsOfTheirOwn) {
  EXPECT_EQ(DirectReader::place(0, 0), 0);
  EXPECT_EQ(DirectReader::place(5, 0), 5);
  EXPECT_EQ(DirectReader::place(3 * kUnit + 5, 1), kUnit + 5);
  EXPECT_EQ(DirectReader::place(kUnit - 1, kUnit), 2 * kUnit - 1);
  EXPECT_EQ(DirectReader::end_of(0), 0);
  EXPECT_EQ(DirectReader::end_of(kUnit + 1), 2 * kUnit);
}

TEST(DirectReader, ReadsWhatIsInTheCacheAndWhatIsNot) {
  const TempDir dir;
  std::mt19937_64 random(7);
  std::vector<std::byte> content((std::size_t{1} << 20) + 123);
  for (std::byte& b : content) b = static_cast<std::byte>(random());
  {
    const auto made = File::create(dir / "file");
    ASSERT_TRUE(made);
    ASSERT_TRUE(made->write_at(0, content));
    ASSERT_EQ(::fdatasync(made->descriptor()), 0);
  }
  auto opened = File::open(dir / "file");
  ASSERT_TRUE(opened);
  const auto file = std::make_shared<const File>(std::move(*opened));
  DirectReader reader;
  const auto size = static_cast<Index>(content.size());
  for (int round = 0; round < 60; ++round) {
    // All of it, some of it, or nothing is in the cache.
    if (round % 3 > 0) ::posix_fadvise(file->descriptor(), 0, 0, POSIX_FADV_DONTNEED);
    std::byte one{};
    if (round % 3 > 1) {
      ASSERT_TRUE(file->read_at(static_cast<Index>(random() % 1000000), MutableBytes(&one, 1)));
    }
    const Index offset = round == 1 ? 0 : static_cast<Index>(random() % 1000000);
    const Index length =
        round < 10 ? size - offset : static_cast<Index>(random() % static_cast<std::uint64_t>(size - offset));
    const Index at = DirectReader::place(offset, static_cast<Index>(random() % 9000));
    const Memory memory(at + length);
    const Status done = reader.read(file, offset, length, memory.bytes(), at);
    ASSERT_TRUE(done) << done.error().message();
    EXPECT_TRUE(std::equal(memory.data + at, memory.data + at + length, content.begin() + offset))
        << offset << " + " << length;
  }
  const Memory memory(size);
  const Status beyond = reader.read(file, kUnit, size, memory.bytes(), 0);
  const Status expected = file->read_at(kUnit, memory.bytes().first(static_cast<std::size_t>(size)));
  ASSERT_FALSE(beyond);
  ASSERT_FALSE(expected);
  EXPECT_EQ(beyond.error().code(), expected.error().code());
}

// What a device is given: bytes as files have them, and where to put them. Put in place they are what read() says.
TEST(ReadAsStored, PutInPlaceIsWhatIsRead) {
  int in_pieces = 0;
  for (const char* name : {"tp8", "fsdp4_tp2"}) {
    const auto open = open_checkpoint(sample(name) + "/checkpoint");
    ASSERT_TRUE(open) << open.error().message();
    const Catalog& catalog = open->reader->catalog();
    FileSource source(catalog, open->reader->files());
    std::vector<std::byte> scratch(std::size_t{1} << 20);
    for (std::size_t t = 0; t < catalog.tensors().size(); ++t) {
      const Tensor& tensor = catalog.tensors()[t];
      const Index element = byte_size(tensor.dtype), bytes = volume(tensor.shape) * element;
      if (tensor.fragments.empty() || bytes == 0) continue;
      const Box box = whole(tensor.shape);
      std::vector<std::byte> expected(static_cast<std::size_t>(bytes)), placed(expected.size());
      ASSERT_TRUE(source.read(t, box, expected, scratch));
      const Memory memory(bytes + 64 * kUnit);
      std::vector<LaidPiece> pieces;
      const auto used = source.read_as_stored(t, box, memory.bytes(), pieces);
      ASSERT_TRUE(used) << used.error().message();
      ASSERT_GE(*used, bytes) << tensor.name;
      const Dims strides = row_major_strides(box.shape);
      for (const LaidPiece& piece : pieces)
        copy_box(piece.box.shape, element, memory.data + piece.at, piece.strides,
                 placed.data() + offset_in(box, strides, piece.box) * element, strides);
      EXPECT_TRUE(placed == expected) << tensor.name;
      in_pieces += pieces.size() > 1 ? 1 : 0;
      // Memory that has no room for it is an answer, not an error.
      const auto none = source.read_as_stored(t, box, memory.bytes().first(1), pieces);
      ASSERT_TRUE(none);
      EXPECT_EQ(*none, 0);
    }
  }
  EXPECT_GT(in_pieces, 0);
}

}  // namespace
}  // namespace reshard
