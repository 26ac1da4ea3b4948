#include "lib/output/journal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <new>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard::journal_test {
namespace {

bool same(const CrcPiece& a, const CrcPiece& b) {
  return a.extent == b.extent && a.begin == b.begin && a.length == b.length && a.crc == b.crc;
}
bool same(const std::vector<CrcPiece>& a, const std::vector<CrcPiece>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) { return same(x, y); });
}
bool same(const FinishedSlabs& a, const FinishedSlabs& b) {
  return a.bytes == b.bytes && a.slabs == b.slabs && a.digests == b.digests && same(a.read, b.read) &&
         same(a.written, b.written);
}

FinishedSlabs finished(const File& file) {
  const auto text = read_journal(file);
  return text && *text ? (*text)->finished : FinishedSlabs();
}
FinishedSlabs finished(const std::string& path) {
  const auto file = File::open(path);
  return file ? finished(*file) : FinishedSlabs();
}

// Writes a journal with five groups of slabs. Returns its content after each.
std::vector<FinishedSlabs> make_journal(const std::string& path) {
  EXPECT_TRUE(File::create(path));
  std::vector<FinishedSlabs> out = {{}};
  std::vector<CrcPiece> read;
  int synced = 0;
  Journal journal([&] { return File::open(path, File::Access::kReadWrite); }, 0, R"({"--to":"hf"})", 100,
                  [&]() -> Status {
                    ++synced;
                    return {};
                  });
  journal.begin({1000, 2000}, [&] { return std::exchange(read, {}); });
  std::mt19937 random(1);
  for (Index slab = 0; slab < 15; ++slab) {
    Digest a, b;
    for (std::uint32_t& word : a.words) word = static_cast<std::uint32_t>(random());
    b.words[2] = 7;
    read.push_back({{3, 100 * slab, 64}, 0, 64, static_cast<std::uint32_t>(random())});
    const Index scattered = slab * 7 % 15;
    EXPECT_TRUE(journal.add(scattered, scattered / 4, 40, {a, b}, {{{1, 50 * slab, 40}, 4, 36, 9}}));
    if (slab % 3 != 2) continue;
    out.push_back(finished(path));
    EXPECT_EQ(out.back().bytes, 40 * (slab + 1));
    EXPECT_EQ(journal.bytes(), 40 * (slab + 1));
  }
  EXPECT_EQ(synced, 5);
  EXPECT_EQ(out.back().slabs, (std::map<Index, Index>{{0, 15}}));
  EXPECT_EQ(out.back().read.size(), 15u);
  EXPECT_EQ(out.back().written.size(), 15u);
  return out;
}

TEST(Journal, SaysWhatWasFinishedWhateverIsCutOffOrDamaged) {
  const TempDir dir;
  const auto said = make_journal(dir / "journal");
  const std::string whole = read_file(dir / "journal");
  std::set<std::size_t> seen;
  const File damaged = *File::create_in_memory();
  const auto expect_prefix = [&](const std::string& bytes) {
    ASSERT_TRUE(damaged.set_length(0));
    ASSERT_TRUE(damaged.write_at(0, as_bytes(bytes)));
    const FinishedSlabs got = finished(damaged);
    const auto at = std::find_if(said.begin(), said.end(), [&](const FinishedSlabs& s) { return same(s, got); });
    ASSERT_NE(at, said.end());
    seen.insert(static_cast<std::size_t>(at - said.begin()));
  };
  for (std::size_t n = 0; n < whole.size(); ++n) {
    expect_prefix(whole.substr(0, n));
    std::string bytes = whole;
    bytes[n] = static_cast<char>(bytes[n] ^ (1 << n % 8));
    expect_prefix(bytes);
  }
  EXPECT_EQ(seen.size(), said.size() - 1);  // never the complete journal
  expect_prefix(whole);
  expect_prefix(whole + "\x20\0\0\0rest");
  expect_prefix(whole + whole.substr(whole.size() / 2));
  EXPECT_TRUE(same(finished(damaged), said.back()));
}

TEST(Journal, IsWrittenAgainAsItWas) {
  const TempDir dir;
  make_journal(dir / "journal");
  const auto text = read_journal(*File::open(dir / "journal"));
  ASSERT_TRUE(text && *text);
  EXPECT_EQ((*text)->cut, (SlabCut{1000, 2000}));
  EXPECT_EQ((*text)->facts, R"({"--to":"hf"})");
  const File file = *File::create(dir / "again");
  const auto length = write_journal(file, **text);
  ASSERT_TRUE(length);
  EXPECT_EQ(*length, *file.size());
  EXPECT_TRUE(same(finished(dir / "again"), (*text)->finished));
}

TEST(Journal, TellsWhatIsFinishedOnce) {
  FinishedSlabs all;
  all.add_run(10, 5);
  all.add_run(20, 5);
  for (const auto& [first, count] : {std::pair<Index, Index>{14, 1}, {5, 6}, {12, 2}, {19, 2}, {0, 100}, {24, 9}}) {
    FinishedSlabs more;
    more.add_run(first, count);
    EXPECT_FALSE(all.add(more)) << first;
  }
  FinishedSlabs more;
  more.add_run(15, 5);
  more.add_run(30, 1);
  EXPECT_TRUE(all.add(more));
  EXPECT_EQ(all.slabs, (std::map<Index, Index>{{10, 15}, {30, 1}}));
}

TEST(Journal, KeepsNoMoreOfSmallTensorsThanItMay) {
  const TempDir dir;
  ASSERT_TRUE(File::create(dir / "journal"));
  Journal journal([&] { return File::open(dir / "journal", File::Access::kReadWrite); }, 0, "{}", Index{1} << 30,
                  [] { return Status(); });
  journal.begin({1000, 2000}, nullptr);
  Index added = 0;
  for (Index slab = 0; slab < 2 * Journal::kEntries; ++slab) {
    std::vector<CrcPiece> sums;
    if (slab % 2 == 0) sums.push_back({{0, 16 * slab, 16}, 0, 16, 1});
    ASSERT_TRUE(journal.add(slab, slab, 16, {}, sums));
    added += 16;
    const Index open = (added - journal.bytes()) / 16;  // tensors, half of them with a sum
    ASSERT_LT(open + open / 2, Journal::kEntries);
  }
  EXPECT_GT(journal.bytes(), 16 * Journal::kEntries);
  EXPECT_EQ(finished(dir / "journal").bytes, journal.bytes());
}

TEST(Journal, SaysNoMoreWhereTheDiskFailed) {
  const TempDir dir;
  bool fails = false;
  Journal journal([&] { return File::create(dir / "journal"); }, 0, "{}", 100,
                  [&] { return fails ? Status(io_error("disk")) : Status(); });
  journal.begin({1, 1}, nullptr);
  EXPECT_TRUE(journal.add(0, 0, 100, {}, {}));
  fails = true;
  EXPECT_FALSE(journal.add(1, 0, 100, {}, {}));
  fails = false;
  EXPECT_TRUE(journal.add(2, 0, 100, {}, {}));
  EXPECT_TRUE(journal.close_group());
  EXPECT_EQ(journal.bytes(), 100);
  EXPECT_EQ(finished(dir / "journal").slabs, (std::map<Index, Index>{{0, 1}}));
}

TEST(Journal, NobodyWaitsForAGroupThatThereWasNoMemoryFor) {
  const TempDir dir;
  Journal* waited_for = nullptr;
  std::optional<std::jthread> other;
  Status of_other;
  Journal journal([&] { return File::create(dir / "journal"); }, 0, "{}", 100,
                  [&]() -> Status {
                    other.emplace([&] {
                      for (Index slab = 1; slab < 3 && of_other; ++slab)
                        of_other = waited_for->add(slab, 0, 100, {}, {});
                    });
                    throw std::bad_alloc();
                  });
  waited_for = &journal;
  journal.begin({1, 1}, nullptr);
  const Status status = journal.add(0, 0, 100, {}, {});
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().message(), "out of memory");
  EXPECT_EQ(status.error().code(), ErrorCode::kIo);
  other.reset();
  EXPECT_TRUE(of_other);  // the thread that met the error reports it
  EXPECT_TRUE(journal.close_group());
  EXPECT_EQ(journal.bytes(), 0);
  EXPECT_FALSE(*path_exists(dir / "journal"));
}

TEST(Journal, NamesTheFactsThatChanged) {
  const auto changed = changed_facts(R"({"a":"1","b":"2","c":"3"})", R"({"b":"2","a":"0","d":"4"})");
  ASSERT_TRUE(changed);
  EXPECT_EQ(*changed, (std::vector<std::string>{"a", "d", "c"}));
  EXPECT_FALSE(changed_facts("[", "{}"));
  EXPECT_FALSE(changed_facts("[]", "{}"));
}

}  // namespace
}  // namespace reshard::journal_test
