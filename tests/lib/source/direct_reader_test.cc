// Tests reads for devices and walks: cached and direct reads give the same bytes at any offset and length.
#include "lib/source/direct_reader.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <utility>

#include "formats/dcp/dcp.h"
#include "formats/open.h"
#include "lib/base/syscalls.h"
#include "lib/device/copy.h"
#include "lib/source/tensor_source.h"
#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard::direct_reader_test {
namespace {

constexpr Index kUnit = File::kDirectUnit;

// Returns whether a path is on a memory file system.
bool is_memory(const std::string& path) {
  struct statfs where {};
  return ::statfs(path.c_str(), &where) == 0 && where.f_type == TMPFS_MAGIC;
}

void drop_from_cache(const std::string& path) {
  const auto file = File::open(path);
  ASSERT_TRUE(file);
  ASSERT_EQ(::fdatasync(file->descriptor()), 0);
  ASSERT_EQ(::posix_fadvise(file->descriptor(), 0, 0, POSIX_FADV_DONTNEED), 0);
}

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

// A file of random bytes on disk.
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
    // The file is cached completely, partly, or not at all.
    if (round % 3 > 0) drop_from_cache(file_->path());
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

TEST_F(DirectReaderFile, IsReadThroughTheCacheWhereItIsInIt) {
  if (is_memory(dir_.path())) GTEST_SKIP() << "this directory is nothing but cache";
  Syscalls calls = sys();
  calls.open = [](const char* path, int flags, mode_t mode) {
    if ((flags & O_DIRECT) != 0) ++opened_directly;
    return ::open(path, flags, mode);
  };
  const ScopedSyscalls scope(calls);
  std::vector<std::byte> all(content_.size());
  for (const Index offset : {Index{0}, Index{4095}, Index{70000}}) {
    for (const bool is_cached : {true, false}) {
      drop_from_cache(file_->path());
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

// A device gets stored bytes and their destinations. Rearranged accordingly, they equal the result of read_pieces(),
// for all pieces of a box and for some.
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
      // If the memory is too small, the call says so without an error.
      const auto none = source.read_as_stored(t, box, nullptr, memory.bytes().first(1), pieces);
      ASSERT_TRUE(none);
      EXPECT_EQ(*none, 0);
    }
  }
  EXPECT_GT(in_pieces, 0);
  EXPECT_GT(left_out, 0);
}

// ---- Reads of a walk

enum class OnDirect { kReads, kFallsShort, kOpensNot, kFails };
OnDirect on_direct;
std::atomic<Index> read_past_cache{0};
constexpr Index kBad = 100 * kUnit;  // a page of each file that cannot be read while `is_damaged`
bool is_damaged;

bool is_direct(int fd) { return (::fcntl(fd, F_GETFL) & O_DIRECT) != 0; }

Syscalls watched_calls() {
  Syscalls calls = sys();
  calls.open = [](const char* path, int flags, mode_t mode) {
    if ((flags & O_DIRECT) == 0 || on_direct != OnDirect::kOpensNot) return ::open(path, flags, mode);
    errno = EINVAL;
    return -1;
  };
  calls.pread = [](int fd, void* buffer, std::size_t n, off_t offset) -> ssize_t {
    if (is_damaged && offset < kBad + kUnit && offset + static_cast<Index>(n) > kBad) {
      if (is_direct(fd) || offset >= kBad) return errno = EIO, -1;
      n = static_cast<std::size_t>(kBad - offset);  // the read ends at the bad page
    }
    if (!is_direct(fd)) return ::pread(fd, buffer, n, offset);
    if (on_direct == OnDirect::kFails) return errno = EINVAL, -1;
    if (on_direct == OnDirect::kFallsShort) n = std::max<std::size_t>(kUnit, n / 3 / kUnit * kUnit);
    read_past_cache += static_cast<Index>(n);
    return ::pread(fd, buffer, n, offset);
  };
  return calls;
}

// A checkpoint of six files. Boxes are stored in one run, in rows, or between other data.
class ReadOnce : public testing::Test {
 protected:
  ReadOnce() : scoped_(watched_calls()) {
    on_direct = OnDirect::kReads;
    is_damaged = false;
    for (char& c : bytes_) c = static_cast<char>(random_());
    LayoutRequest request;
    request.mesh = *Mesh::parse("dp_shard=3,tp=2");
    request.tensors.push_back({"m", DType::kInt16, {kRows, kColumns}, {}, Placement{{{{"tp"}, 1}, {{"dp_shard"}, 0}}}});
    const auto target = kDcpFormat.lay_out(std::move(request));
    write_target({{"m", {DType::kInt16, {kRows, kColumns}, bytes_}}}, **target, dir_ / "ck");
    reader_ = std::move(open_checkpoint(dir_ / "ck")->reader);
    EXPECT_TRUE(reader_->locate({0}, 1, dir_.path()));
  }
  void drop_all() {
    for (const std::string& path : catalog().file_paths()) drop_from_cache(path);
  }
  void cache_all() {
    for (const std::string& path : catalog().file_paths()) read_file(path);
  }
  Box random_box() {
    const auto some = [&](Index most) { return static_cast<Index>(random_() % static_cast<std::uint64_t>(most)); };
    const Index row = some(kRows), rows = 1 + some(kRows - row), column = some(kColumns);
    if (some(3) == 0) return {{row, column}, {rows, 1 + some(kColumns - column)}};
    return some(2) == 0 ? Box{{row, 0}, {rows, kColumns}} : Box{{row, 0}, {rows, (kColumns + 1) / 2}};
  }
  std::string expected(const Box& box) const {
    std::string out;
    for (Index r = box.begin(0); r < box.end(0); ++r)
      out += bytes_.substr(static_cast<std::size_t>(2 * (r * kColumns + box.begin(1))),
                           static_cast<std::size_t>(2 * box.shape[1]));
    return out;
  }
  Result<std::string> read(FileSource& source, const Box& box) {
    std::string out(static_cast<std::size_t>(2 * volume(box)), '\0');
    TRY(source.read(0, box, std::as_writable_bytes(std::span(out)), scratch_.bytes()));
    return out;
  }
  Catalog& catalog() { return reader_->catalog(); }
  FilePool& files() { return reader_->files(); }

  static constexpr Index kRows = 3073, kColumns = 1021;  // 1 MB a file
  TempDir dir_;
  ScopedSyscalls scoped_;
  std::mt19937_64 random_{5};
  std::string bytes_ = std::string(2 * kRows * kColumns, '\0');
  std::unique_ptr<Reader> reader_;
  Memory scratch_{(Index{3} << 18) + 2 * kUnit};
};

TEST_F(ReadOnce, GivesTheSameBytesWhateverIsCached) {
  for (const OnDirect way : {OnDirect::kReads, OnDirect::kFallsShort, OnDirect::kOpensNot, OnDirect::kFails}) {
    on_direct = way;
    read_past_cache = 0;
    for (int round = 0; round < 40; ++round) {
      FileSource source(catalog(), files());
      source.expect_once();
      if (round % 4 == 0) cache_all();
      if (round % 4 == 1) drop_all();
      const Box box = random_box();  // an earlier read may have cached some of it
      const auto got = read(source, box);
      ASSERT_TRUE(got) << got.error().message();
      ASSERT_TRUE(*got == expected(box)) << to_string(box);
    }
    const bool goes = DirectReader::pays_at(dir_.path()) && (way == OnDirect::kReads || way == OnDirect::kFallsShort);
    EXPECT_EQ(read_past_cache > 0, goes);
  }
}

TEST_F(ReadOnce, ReadsPastTheCacheWhatItHasNotGotAndNothingElse) {
  if (!DirectReader::pays_at(dir_.path())) GTEST_SKIP() << "neither ext4 nor xfs";
  const Box all = whole({kRows, kColumns}), columns{{0, 100}, {kRows, 300}}, few{{0, 0}, {30, kColumns}};
  const auto past_cache = [&](const Box& box, bool is_once) {
    read_past_cache = 0;
    FileSource source(catalog(), files());
    if (is_once) source.expect_once();
    EXPECT_TRUE(read(source, box));
    return read_past_cache.load();
  };
  drop_all();
  EXPECT_GE(past_cache(all, true), std::ssize(bytes_));
  EXPECT_GE(past_cache(all, true), std::ssize(bytes_));  // and reading it did not cache it
  EXPECT_EQ(past_cache(few, true), 0);
  EXPECT_EQ(past_cache(columns, true), 0);  // the gaps are read too, and may be needed next
  drop_all();
  EXPECT_EQ(past_cache(all, false), 0);
  EXPECT_EQ(past_cache(all, true), 0);  // the file is cached now
}

TEST_F(ReadOnce, SaysOfDamageWhatIsSaidOtherwise) {
  const Box all = whole({kRows, kColumns});
  const auto message = [&](bool is_once) {
    drop_all();
    FileSource source(catalog(), files());
    if (is_once) source.expect_once();
    const auto got = read(source, all);
    return got ? std::string() : got.error().message();
  };
  is_damaged = true;
  const std::string unreadable = message(false);
  EXPECT_THAT(unreadable, testing::HasSubstr(std::strerror(EIO)));
  EXPECT_EQ(message(true), unreadable);
  is_damaged = false;
  const std::string path = catalog().file_paths().back();
  std::string bytes = read_file(path);
  bytes[bytes.size() / 2] ^= 1;
  write_file(path, bytes);
  const std::string damaged = message(false);
  EXPECT_THAT(damaged, testing::HasSubstr("CRC-32"));
  EXPECT_EQ(message(true), damaged);
  write_file(path, bytes.substr(0, 700'001));
  const std::string cut = message(false);
  EXPECT_THAT(cut, testing::HasSubstr("before the end of the file"));
  EXPECT_EQ(message(true), cut);
}

}  // namespace
}  // namespace reshard::direct_reader_test
