// What devices are given of files. Reads through the page cache and past it give the same bytes, wherever they begin
// and end.
#include "lib/engine/direct_reader.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <numeric>
#include <random>

#include "formats/registry.h"
#include "lib/base/sys.h"
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

// A file of random bytes on the disk.
class DirectReaderFile : public testing::Test {
 protected:
  DirectReaderFile() {
    for (std::byte& b : content_) b = static_cast<std::byte>(random_());
    const auto made = File::create(dir_ / "file");
    EXPECT_TRUE(made);
    EXPECT_TRUE(made->write_at(0, content_));
    EXPECT_EQ(::fdatasync(made->descriptor()), 0);
    file_ = std::make_shared<const File>(*File::open(dir_ / "file"));
  }
  void drop_from_cache() const { ::posix_fadvise(file_->descriptor(), 0, 0, POSIX_FADV_DONTNEED); }
  void expect_read(DirectReader& reader, Index offset, Index length, Index at) const {
    const Memory memory(at + length);
    const Status done = reader.read(file_, offset, length, memory.bytes(), at);
    ASSERT_TRUE(done) << done.error().message();
    EXPECT_TRUE(std::equal(memory.data + at, memory.data + at + length, content_.begin() + offset))
        << offset << " + " << length;
  }
  TempDir dir_;
  std::mt19937_64 random_{7};
  std::vector<std::byte> content_ = std::vector<std::byte>((std::size_t{1} << 20) + 123);
  Index size_ = std::ssize(content_);
  std::shared_ptr<const File> file_;
};

TEST_F(DirectReaderFile, IsReadWhetherInTheCacheOrNot) {
  DirectReader reader;
  for (int round = 0; round < 60; ++round) {
    // All of it, some of it, or nothing is in the cache.
    if (round % 3 > 0) drop_from_cache();
    std::byte one{};
    if (round % 3 > 1) {
      ASSERT_TRUE(file_->read_at(static_cast<Index>(random_() % 1000000), MutableBytes(&one, 1)));
    }
    const Index offset = round == 1 ? 0 : static_cast<Index>(random_() % 1000000);
    const Index length =
        round < 10 ? size_ - offset : static_cast<Index>(random_() % static_cast<std::uint64_t>(size_ - offset));
    expect_read(reader, offset, length, DirectReader::place(offset, static_cast<Index>(random_() % 9000)));
  }
  const Memory memory(size_);
  const Status beyond = reader.read(file_, kUnit, size_, memory.bytes(), 0);
  const Status expected = file_->read_at(kUnit, memory.bytes().first(static_cast<std::size_t>(size_)));
  ASSERT_FALSE(beyond);
  ASSERT_FALSE(expected);
  EXPECT_EQ(beyond.error().code(), expected.error().code());
}

std::atomic<int> opened_directly{0};

// As on an overlay, which does not say by reading what is in the cache.
TEST_F(DirectReaderFile, IsReadThroughTheCacheWhereItIsInItThoughReadingDoesNotTell) {
  struct statfs where {};
  ASSERT_EQ(::statfs(dir_.path().c_str(), &where), 0);
  if (where.f_type == TMPFS_MAGIC) GTEST_SKIP() << "this directory is nothing but cache";
  SysCalls calls = sys();
  calls.preadv2 = [](int, const iovec*, int, off_t, int) -> ssize_t {
    errno = EOPNOTSUPP;
    return -1;
  };
  calls.open = [](const char* path, int flags, mode_t mode) {
    if ((flags & O_DIRECT) != 0) ++opened_directly;
    return ::open(path, flags, mode);
  };
  const ScopedSysCalls scope(calls);
  std::vector<std::byte> all(content_.size());
  for (const Index offset : {Index{0}, Index{4095}, Index{70000}}) {
    for (const bool is_cached : {true, false}) {
      drop_from_cache();
      if (is_cached) {
        ASSERT_TRUE(file_->read_at(0, all));
      }
      opened_directly = 0;
      DirectReader reader;
      expect_read(reader, offset, size_ - offset, offset % kUnit);
      EXPECT_EQ(opened_directly, is_cached ? 0 : 1) << offset;
    }
  }
}

// What a device is given: bytes as files have them, and where to put them. Put in place they are what read_pieces()
// says, of all pieces of a box and of some.
TEST(ReadAsStored, PutInPlaceIsWhatIsRead) {
  const TempDir dir;
  int in_pieces = 0, left_out = 0;
  for (const char* name : {"tp8", "fsdp4_tp2"}) {
    const auto open = open_checkpoint(sample(name) + "/checkpoint");
    ASSERT_TRUE(open) << open.error().message();
    Catalog& catalog = open->reader->catalog();
    std::vector<std::size_t> all(catalog.tensors().size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    ASSERT_TRUE(open->reader->locate(all, 1, dir.path()));
    FileSource source(catalog, open->reader->files());
    std::vector<std::byte> scratch(std::size_t{1} << 20);
    const PieceFilter of_some_files = [](const StoredPiece& piece) { return piece.file % 2 == 1; };
    for (const std::size_t t : all) {
      const Tensor& tensor = catalog.tensors()[t];
      const Index element = byte_size(tensor.dtype), bytes = volume(tensor.shape) * element;
      if (tensor.fragments.empty() || bytes == 0) continue;
      const Box box = whole(tensor.shape);
      const Memory memory(bytes + 64 * kUnit);
      std::vector<LaidPiece> pieces;
      for (const PieceFilter& wanted : {PieceFilter(), of_some_files}) {
        pieces.clear();
        std::vector<std::byte> expected(static_cast<std::size_t>(bytes), std::byte{0xcc}), placed = expected;
        ASSERT_TRUE(source.read_pieces(t, box, wanted, expected, scratch));
        const auto used = source.read_as_stored(t, box, wanted, memory.bytes(), pieces);
        ASSERT_TRUE(used) << used.error().message();
        ASSERT_TRUE(wanted || *used >= bytes) << tensor.name;
        const Dims strides = row_major_strides(box.shape);
        for (const LaidPiece& piece : pieces)
          copy_box(piece.box.shape, element, memory.data + piece.at, piece.strides,
                   placed.data() + offset_in(box, strides, piece.box) * element, strides);
        EXPECT_TRUE(placed == expected) << tensor.name;
        in_pieces += pieces.size() > 1 ? 1 : 0;
        left_out += *used < bytes ? 1 : 0;
      }
      // Memory that has no room for it is an answer, not an error.
      const auto none = source.read_as_stored(t, box, nullptr, memory.bytes().first(1), pieces);
      ASSERT_TRUE(none);
      EXPECT_EQ(*none, 0);
    }
  }
  EXPECT_GT(in_pieces, 0);
  EXPECT_GT(left_out, 0);
}

}  // namespace
}  // namespace reshard
