#include "lib/base/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "lib/base/syscalls.h"
#include "tests/support/temp_dir.h"

namespace reshard::file_test {
namespace {

namespace fs = std::filesystem;

void put(const std::string& path, std::string_view text) { std::ofstream(path, std::ios::binary) << text; }

std::string get(const std::string& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

std::string read_text(const File& file, Index offset, std::size_t n) {
  std::string out(n, '?');
  const Status s = file.read_at(offset, {reinterpret_cast<std::byte*>(out.data()), n});
  return s ? out : "error: " + s.error().message();
}

std::string message_of(const Status& s) { return s ? "fine" : s.error().message(); }

// Returns how many descriptors of this process are open on files of `directory`.
int open_files_in(const std::string& directory) {
  int n = 0;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/proc/self/fd"))
    n += fs::read_symlink(entry.path(), ignored).string().starts_with(directory + "/");
  return n;
}

// ---- reading and writing

TEST(File, ReadsBackWhatItWrote) {
  const TempDir dir;
  File file = *File::create(dir / "f");
  ASSERT_TRUE(file.write_at(3, as_bytes("defg")));
  ASSERT_TRUE(file.write_at(0, as_bytes("abc")));
  ASSERT_TRUE(file.sync_data());
  ASSERT_TRUE(file.close());
  const File again = *File::open(dir / "f");
  EXPECT_EQ(*again.size(), 7);
  EXPECT_EQ(read_text(again, 2, 3), "cde");
  EXPECT_EQ(read_text(again, 7, 0), "");
}

TEST(File, AnEndOfFileIsCorruptAndSaysHowMuchWasThere) {
  const TempDir dir;
  put(dir / "f", "abcdef");
  const File file = *File::open(dir / "f");
  EXPECT_EQ(read_text(file, 4, 10), "error: " + (dir / "f@0x4: expected 10 bytes, got 2 before the end of the file"));
  std::array<std::byte, 1> one{};
  EXPECT_EQ(file.read_at(100, one).error().code(), ErrorCode::kCorrupt);
}

// Each call is interrupted first and then moves one to three bytes.
int interruptions = 0;

TEST(File, ShortAndInterruptedReadsAndWritesAreCarriedThrough) {
  const TempDir dir;
  std::string text;
  for (int i = 0; i < 200; ++i) text += std::to_string(i) + ",";
  interruptions = 0;
  Syscalls slow = sys();
  slow.pread = [](int fd, void* buffer, std::size_t n, off_t offset) -> ssize_t {
    if (++interruptions % 2 == 1) {
      errno = EINTR;
      return -1;
    }
    return ::pread(fd, buffer, std::min<std::size_t>(n, 1 + static_cast<std::size_t>(offset) % 3), offset);
  };
  slow.pwrite = [](int fd, const void* buffer, std::size_t n, off_t offset) -> ssize_t {
    if (++interruptions % 2 == 1) {
      errno = EINTR;
      return -1;
    }
    return ::pwrite(fd, buffer, std::min<std::size_t>(n, 1 + static_cast<std::size_t>(offset) % 3), offset);
  };
  slow.open = [](const char* path, int flags, mode_t mode) {
    if (++interruptions % 2 == 1) {
      errno = EINTR;
      return -1;
    }
    return ::open(path, flags, mode);
  };
  const ScopedSyscalls scope(slow);
  const File file = *File::create(dir / "f");
  ASSERT_TRUE(file.write_at(0, as_bytes(text)));
  EXPECT_EQ(get(dir / "f"), text);
  EXPECT_EQ(read_text(file, 0, text.size()), text);
  EXPECT_EQ(*read_whole_file(dir / "f", 10'000), text);
  EXPECT_GT(interruptions, 1000);
}

TEST(File, ReadAndWriteErrorsNameThePlaceAndTheReason) {
  const TempDir dir;
  const File file = *File::create(dir / "f");
  ASSERT_TRUE(file.write_at(0, as_bytes("0123456789")));
  Syscalls broken = sys();
  broken.pread = [](int fd, void* buffer, std::size_t n, off_t offset) -> ssize_t {
    if (offset < 4) return ::pread(fd, buffer, std::min<std::size_t>(n, 4), offset);
    errno = EIO;
    return -1;
  };
  broken.pwrite = [](int, const void*, std::size_t, off_t) -> ssize_t {
    errno = ENOSPC;
    return -1;
  };
  broken.fdatasync = [](int) {
    errno = EIO;
    return -1;
  };
  const ScopedSyscalls scope(broken);
  EXPECT_EQ(read_text(file, 0, 10), "error: " + (dir / "f@0x4: cannot read: Input/output error"));
  EXPECT_EQ(message_of(file.write_at(16, as_bytes("x"))), dir / "f@0x10: cannot write: No space left on device");
  EXPECT_EQ(message_of(file.sync_data()), dir / "f: cannot write to disk: Input/output error");
}

TEST(File, AWriteThatMakesNoProgressEnds) {
  const TempDir dir;
  const File file = *File::create(dir / "f");
  Syscalls stuck = sys();
  stuck.pwrite = [](int, const void*, std::size_t, off_t) -> ssize_t { return 0; };
  const ScopedSyscalls scope(stuck);
  EXPECT_EQ(message_of(file.write_at(0, as_bytes("x"))), dir / "f@0x0: cannot write: no progress");
}

TEST(File, OpenRefusesWhatIsNoRegularFile) {
  const TempDir dir;
  EXPECT_EQ(File::open(dir / "absent").error().message(), dir / "absent: cannot open: No such file or directory");
  EXPECT_EQ(File::open(dir / "absent").error().code(), ErrorCode::kIo);
  EXPECT_EQ(File::open(dir.path()).error().message(), dir.path() + ": expected a regular file");
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(File::open(dir / "pipe").error().message(), dir / "pipe: expected a regular file") << "and does not wait";
}

TEST(File, CreateNeverTouchesWhatIsThere) {
  const TempDir dir;
  put(dir / "f", "precious");
  EXPECT_EQ(File::create(dir / "f").error().message(), dir / "f: cannot create: File exists");
  EXPECT_EQ(get(dir / "f"), "precious");
  fs::create_symlink(dir / "elsewhere", dir / "link");
  EXPECT_FALSE(File::create(dir / "link"));
  EXPECT_FALSE(*path_exists(dir / "elsewhere"));
}

TEST(File, AnAnonymousFileLeavesNoName) {
  const TempDir dir;
  const File file = *File::create_anonymous(dir.path());
  ASSERT_TRUE(file.write_at(0, as_bytes("abc")));
  EXPECT_EQ(read_text(file, 0, 3), "abc");
  EXPECT_TRUE(list_directory(dir.path())->empty());
}

TEST(File, IsReopenedForDirectReadingWhateverBecameOfItsName) {
  const TempDir dir;
  const std::string text(File::kDirectUnit, 'x');
  const File file = *File::open(dir.write("f", text));
  const auto direct = file.reopen_direct();
  if (!direct) GTEST_SKIP() << "the file system has no direct reading: " << direct.error().message();
  EXPECT_NE(direct->descriptor(), file.descriptor());
  EXPECT_NE(::fcntl(direct->descriptor(), F_GETFL) & O_DIRECT, 0);
  ASSERT_TRUE(remove_file(dir / "f"));
  const auto again = file.reopen_direct();
  ASSERT_TRUE(again) << again.error().message();
  alignas(File::kDirectUnit) char got[File::kDirectUnit];
  ASSERT_TRUE(again->read_at(0, {reinterpret_cast<std::byte*>(got), sizeof got}));
  EXPECT_TRUE(std::string(got, sizeof got) == text);
}

TEST(File, AFileSystemWithoutDirectReadingSaysSo) {
  const TempDir dir;
  const File file = *File::open(dir.write("f", "abc"));
  Syscalls calls = sys();
  calls.open = [](const char*, int, mode_t) {
    errno = EINVAL;
    return -1;
  };
  const ScopedSyscalls refusing(calls);
  const auto direct = file.reopen_direct();
  ASSERT_FALSE(direct);
  EXPECT_EQ(direct.error().message(), (dir / "f") + ": cannot open for direct reading: Invalid argument");
}

TEST(File, AnAnonymousFileNeedsNoTmpfileSupport) {
  const TempDir dir;
  Syscalls old = sys();
  old.open = [](const char* path, int flags, mode_t mode) {
    if ((flags & O_TMPFILE) == O_TMPFILE) {
      errno = EOPNOTSUPP;
      return -1;
    }
    return ::open(path, flags, mode);
  };
  const ScopedSyscalls scope(old);
  const File first = *File::create_anonymous(dir.path());
  const File second = *File::create_anonymous(dir.path());
  ASSERT_TRUE(first.write_at(0, as_bytes("abc")));
  EXPECT_EQ(*second.size(), 0);
  EXPECT_TRUE(list_directory(dir.path())->empty());
}

TEST(File, AllocateSetsTheLength) {
  const TempDir dir;
  const File file = *File::create(dir / "f");
  ASSERT_TRUE(file.allocate(10'000));
  EXPECT_EQ(*file.size(), 10'000);
  const File empty = *File::create(dir / "empty");
  ASSERT_TRUE(empty.allocate(0));
  EXPECT_EQ(*empty.size(), 0);
}

TEST(File, AllocateFallsBackToASparseFile) {
  const TempDir dir;
  Syscalls old = sys();
  old.fallocate = [](int, int, off_t, off_t) {
    errno = EOPNOTSUPP;
    return -1;
  };
  const ScopedSyscalls scope(old);
  const File file = *File::create(dir / "f");
  ASSERT_TRUE(file.allocate(5000));
  EXPECT_EQ(*file.size(), 5000);
}

TEST(File, AllocateReportsAFullDisk) {
  const TempDir dir;
  Syscalls full = sys();
  full.fallocate = [](int, int, off_t, off_t) {
    errno = ENOSPC;
    return -1;
  };
  const ScopedSyscalls scope(full);
  const File file = *File::create(dir / "f");
  EXPECT_EQ(message_of(file.allocate(5000)), dir / "f: cannot reserve 5000 bytes: No space left on device");
}

TEST(File, CloseReportsWhatADestructorCouldNot) {
  const TempDir dir;
  File file = *File::create(dir / "f");
  Syscalls full = sys();
  full.close = [](int fd) {
    ::close(fd);
    errno = EDQUOT;
    return -1;
  };
  const ScopedSyscalls scope(full);
  EXPECT_EQ(message_of(file.close()), dir / "f: cannot close: Disk quota exceeded");
  EXPECT_TRUE(file.close()) << "closed is closed";
}

TEST(File, MovingHandsOverTheDescriptor) {
  const TempDir dir;
  const std::string path = dir / "f";
  put(path, "abc");
  {
    File a = *File::open(path);
    File b = std::move(a);
    EXPECT_EQ(read_text(b, 0, 3), "abc");
    EXPECT_EQ(open_files_in(dir.path()), 1);
  }
  EXPECT_EQ(open_files_in(dir.path()), 0);
}

TEST(ReadWholeFile, RefusesAFileAboveTheLimit) {
  const TempDir dir;
  put(dir / "f", "0123456789");
  EXPECT_EQ(*read_whole_file(dir / "f", 10), "0123456789");
  EXPECT_EQ(read_whole_file(dir / "f", 9).error().message(), dir / "f: expected at most 9 bytes, got 10");
}

// ---- FilePool

TEST(FilePool, KeepsNoMoreOpenThanItsCapacity) {
  const TempDir dir;
  for (int i = 0; i < 10; ++i) put(dir / std::to_string(i), std::to_string(i));
  OpenFiles all(3);
  FilePool pool(File::Access::kRead, all);
  for (int round = 0; round < 2; ++round)
    for (int i = 0; i < 10; ++i) {
      EXPECT_EQ(read_text(**pool.open(dir / std::to_string(i)), 0, 1), std::to_string(i));
      EXPECT_LE(open_files_in(dir.path()), 3);
    }
}

TEST(FilePool, LetsGoOfTheLeastRecentlyUsed) {
  const TempDir dir;
  for (const char* name : {"a", "b", "c"}) put(dir / name, name);
  OpenFiles all(2);
  FilePool pool(File::Access::kRead, all);
  const File* a = pool.open(dir / "a")->get();
  ASSERT_TRUE(pool.open(dir / "b"));
  ASSERT_TRUE(pool.open(dir / "a"));
  ASSERT_TRUE(pool.open(dir / "c"));
  EXPECT_EQ(pool.open(dir / "a")->get(), a) << "b went, a stayed";
}

TEST(FilePool, AHeldFileSurvivesEviction) {
  const TempDir dir;
  for (int i = 0; i < 5; ++i) put(dir / std::to_string(i), std::to_string(i));
  OpenFiles all(1);
  FilePool pool(File::Access::kRead, all);
  std::vector<std::shared_ptr<const File>> held;
  for (int i = 0; i < 5; ++i) held.push_back(*pool.open(dir / std::to_string(i)));
  for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(read_text(*held[i], 0, 1), std::to_string(i));
  EXPECT_EQ(open_files_in(dir.path()), 5);
  held.clear();
  EXPECT_EQ(open_files_in(dir.path()), 1);
}

TEST(FilePool, NeverLetsGoOfAPinnedFile) {
  const TempDir dir;
  for (int i = 0; i < 5; ++i) put(dir / std::to_string(i), std::to_string(i));
  OpenFiles all(2);
  FilePool pool(File::Access::kRead, all);
  ASSERT_TRUE(pool.open(dir / "0"));
  ASSERT_TRUE(pool.open(dir / "1"));
  put(dir / "hidden", "pinned");
  pool.pin("(spool)", *File::open(dir / "hidden"));
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(pool.open(dir / std::to_string(i)));
    EXPECT_LE(open_files_in(dir.path()), 2);
  }
  EXPECT_EQ(read_text(**pool.open("(spool)"), 0, 6), "pinned");
}

TEST(FilePool, PoolsTogetherLetGoOfTheLeastRecentlyUsed) {
  const TempDir dir;
  for (int i = 0; i < 8; ++i) put(dir / std::to_string(i), std::to_string(i));
  OpenFiles all(4);
  FilePool first(File::Access::kRead, all);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(first.open(dir / std::to_string(i)));
  {
    FilePool second(File::Access::kRead, all);
    ASSERT_TRUE(first.open(dir / "0"));
    const std::weak_ptr<const File> kept = *first.open(dir / "0"), gone = *first.open(dir / "1");
    ASSERT_TRUE(first.open(dir / "0"));
    for (int i = 4; i < 7; ++i) {
      ASSERT_TRUE(second.open(dir / std::to_string(i)));
      EXPECT_EQ(open_files_in(dir.path()), 4);
    }
    EXPECT_FALSE(kept.expired());
    EXPECT_TRUE(gone.expired()) << "2, 3 and 1 made room, in this order";
    EXPECT_EQ(read_text(**first.open(dir / "1"), 0, 1), "1");
  }
  EXPECT_EQ(open_files_in(dir.path()), 1) << "what the second pool had is closed";
}

TEST(FilePool, AnErrorIsNotKept) {
  const TempDir dir;
  OpenFiles all(2);
  FilePool pool(File::Access::kRead, all);
  EXPECT_FALSE(pool.open(dir / "late"));
  put(dir / "late", "x");
  EXPECT_TRUE(pool.open(dir / "late"));
}

TEST(FilePool, ServesSeveralThreads) {
  const TempDir dir;
  for (int i = 0; i < 8; ++i) put(dir / std::to_string(i), std::to_string(i));
  OpenFiles all(3);
  FilePool pool(File::Access::kRead, all);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 500; ++i) {
        const std::string name = std::to_string((i * 7 + t) % 8);
        wrong += read_text(**pool.open(dir / name), 0, 1) != name;
      }
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_LE(open_files_in(dir.path()), 3);
}

}  // namespace
}  // namespace reshard::file_test
