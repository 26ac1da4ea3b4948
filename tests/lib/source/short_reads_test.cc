#include "lib/source/short_reads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <string>

#include "lib/base/parallel.h"
#include "tests/support/must.h"
#include "tests/support/temp_dir.h"

namespace reshard::short_reads_test {
namespace {

class ShortReadsTest : public testing::Test {
 protected:
  // Opens a new file of random bytes.
  File file(const std::string& name, std::size_t size) {
    std::string& bytes = bytes_.emplace_back(size, '\0');
    for (char& c : bytes) c = static_cast<char>(random_());
    std::ofstream(dir_ / name, std::ios::binary) << bytes;
    return must(File::open(dir_ / name));
  }

  TempDir dir_;
  std::mt19937 random_{3};
  std::vector<std::string> bytes_;  // contents of the files
};

TEST_F(ShortReadsTest, GiveTheBytesOfTheFileInAnyOrderToAnyThread) {
  const File files[2] = {file("a", 300'000), file("b", 70'001)};
  struct Wish {
    std::size_t file;
    Index offset;
    std::size_t length;
  };
  std::vector<Wish> wishes;
  for (int run = 0; run < 200; ++run) {  // in order from some position, with gaps, and to the end
    const std::size_t f = random_() % 2;
    auto at = static_cast<Index>(random_() % bytes_[f].size());
    for (int i = 0; i < 100; ++i) {
      const std::size_t length =
          std::min<std::size_t>(random_() % 300, bytes_[f].size() - static_cast<std::size_t>(at));
      wishes.push_back({f, at, length});
      at += static_cast<Index>(length);
      if (random_() % 4 == 0) at = std::min<Index>(at + random_() % 2000, std::ssize(bytes_[f]));
    }
  }
  ShortReads reads;
  EXPECT_TRUE(parallel_for(std::ssize(wishes), 4, [&](int, Index i) -> Status {
    const Wish& w = wishes[static_cast<std::size_t>(i)];
    std::string out(w.length, '\0');
    const Index size = std::ssize(bytes_[w.file]);
    TRY(reads.read(static_cast<std::uint32_t>(w.file), files[w.file], size, w.offset,
                   std::as_writable_bytes(std::span(out))));
    if (out == bytes_[w.file].substr(static_cast<std::size_t>(w.offset), w.length)) return {};
    return internal_error("other bytes at " + std::to_string(w.offset));
  }));
}

// The remaining bytes of a truncated file can be read; the rest is an error with its offset.
TEST_F(ShortReadsTest, SayWhereAFileEnds) {
  const File shrunk = file("a", 100'000);
  ShortReads reads;
  std::string out(100, '\0');
  const auto read = [&](Index offset) {
    return reads.read(0, shrunk, 100'000, offset, std::as_writable_bytes(std::span(out)));
  };
  ASSERT_TRUE(read(0));
  std::filesystem::resize_file(dir_ / "a", 65'700);
  ASSERT_TRUE(read(65'500));
  EXPECT_EQ(out, bytes_[0].substr(65'500, 100));
  const Status end = read(65'650);
  ASSERT_FALSE(end);
  EXPECT_EQ(end.error().message(), shrunk.read_at(65'650, std::as_writable_bytes(std::span(out))).error().message());
}

}  // namespace
}  // namespace reshard::short_reads_test
