#include "lib/base/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/fs.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <thread>

#include "lib/base/output_guard.h"
#include "lib/base/syscalls.h"
#include "lib/checkpoint/model_code.h"
#include "lib/checkpoint/side_files.h"
#include "lib/source/watched_files.h"
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

template <class T>
std::string why(const Result<T>& result) {
  return result.has_value() ? "no error" : result.error().message();
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

// ---- directories and names

TEST(ReplaceFile, MakesAndReplacesAndLeavesNothingBeside) {
  const TempDir dir;
  ASSERT_TRUE(replace_file(dir / "f", "one"));
  ASSERT_TRUE(replace_file(dir / "f", "two, longer"));
  EXPECT_EQ(get(dir / "f"), "two, longer");
  EXPECT_EQ(list_directory(dir.path())->size(), 1u);
}

TEST(ReplaceFile, AnErrorLeavesTheOldOneAsItWas) {
  const TempDir dir;
  put(dir / "f", "old");
  Syscalls broken = sys();
  broken.rename = [](const char*, const char*, unsigned) {
    errno = EIO;
    return -1;
  };
  const ScopedSyscalls scope(broken);
  EXPECT_EQ(message_of(replace_file(dir / "f", "new")), dir / "f: cannot replace: Input/output error");
  EXPECT_EQ(get(dir / "f"), "old");
  EXPECT_EQ(list_directory(dir.path())->size(), 1u);
}

TEST(ReplaceFile, ReplacesNothingUnlessTold) {
  const TempDir dir;
  put(dir / "f", "old");
  EXPECT_FALSE(replace_file(dir / "f", "new", false));
  EXPECT_EQ(get(dir / "f"), "old");
  ASSERT_TRUE(replace_file(dir / "g", "new", false));
  EXPECT_EQ(get(dir / "g"), "new");
  EXPECT_EQ(list_directory(dir.path())->size(), 2u);
}

TEST(ReplaceFile, WritesThroughALinkAndLeavesADeviceWhatItIs) {
  const TempDir dir;
  put(dir / "f", "old, and longer");
  fs::create_symlink("f", dir / "link");
  ASSERT_TRUE(replace_file(dir / "link", "new"));
  EXPECT_TRUE(fs::is_symlink(dir / "link"));
  EXPECT_EQ(get(dir / "f"), "new");
  fs::create_symlink("/dev/full", dir / "full");
  EXPECT_EQ(message_of(replace_file(dir / "full", "new")), dir / "full: cannot write: No space left on device");
  EXPECT_TRUE(fs::is_symlink(dir / "full"));
}

TEST(Directory, ListingIsSortedAndFollowsLinks) {
  const TempDir dir;
  put(dir / "b", "12345");
  put(dir / ".a", "");
  fs::create_directory(dir / "c");
  fs::create_symlink("b", dir / "link");
  fs::create_symlink("nowhere", dir / "dangling");
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  const auto entries = *list_directory(dir.path());
  ASSERT_EQ(entries.size(), 4U);
  EXPECT_EQ(entries[0].name, ".a");
  EXPECT_EQ(entries[1].name, "b");
  EXPECT_EQ(entries[1].size, 5);
  EXPECT_GT(entries[1].mtime_ns, 1'000'000'000'000'000'000);
  EXPECT_TRUE(entries[2].is_directory);
  EXPECT_EQ(entries[3].name, "link");
  EXPECT_EQ(entries[3].size, 5);
  EXPECT_EQ(list_directory(dir / "no").error().message(), dir / "no: cannot list: No such file or directory");
}

TEST(Directory, OneThatCannotBeReadIsNotEmpty) {
  const TempDir dir;
  dir.write("tree/a", "1");
  dir.write("tree/b", "2");
  static int calls;
  for (int n = 0; n < 3; ++n) {
    calls = n;
    Syscalls broken = sys();
    broken.readdir = [](DIR* directory) -> dirent* {
      if (calls-- > 0) return ::readdir(directory);
      errno = EIO;
      return nullptr;
    };
    const ScopedSyscalls scope(broken);
    const std::string message = dir / "tree: cannot list: Input/output error";
    EXPECT_EQ(list_directory(dir / "tree").error().message(), message);
    calls = n;
    EXPECT_EQ(list_tree(dir / "tree").error().message(), message);
    calls = n;
    EXPECT_EQ(message_of(remove_tree(dir / "tree")), message);
  }
  EXPECT_EQ(list_directory(dir / "tree")->size(), 2u);
}

TEST(Directory, WalkSeesAllThatIsThere) {
  const TempDir dir;
  dir.write("t/b/inner", "12345");
  dir.write("t/a", "");
  dir.write("t/b-c", "");
  fs::create_symlink("nowhere", dir / "t/dangling");
  fs::create_directory_symlink(dir / "t/b", dir / "t/link");
  ASSERT_EQ(::mkfifo((dir / "t/pipe").c_str(), 0600), 0);
  const auto nodes = *list_tree(dir / "t");
  std::vector<std::string> names;
  for (const Node& node : nodes) names.push_back(node.name);
  EXPECT_EQ(names, (std::vector<std::string>{"a", "b", "b/inner", "b-c", "dangling", "link", "pipe"}));
  EXPECT_TRUE(nodes[1].is_directory());
  EXPECT_EQ(nodes[2].size, 5);
  EXPECT_TRUE(nodes[4].is_link());
  EXPECT_TRUE(nodes[5].is_link());
  EXPECT_FALSE(nodes[6].is_regular());
  EXPECT_TRUE(*list_tree(dir / "t") == nodes);
  dir.write("t/b/inner", "123456");
  EXPECT_FALSE(*list_tree(dir / "t") == nodes);
  EXPECT_FALSE(list_tree(dir / "t/link"));
}

TEST(Directory, WhatLiesInIt) {
  const TempDir dir;
  dir.write("a/b/f", "");
  fs::create_directory_symlink(dir / "a/b", dir / "link");
  for (const std::string inside : {"a", "a/b", "a/b/f", "link", "link/f", "a/../a/b"})
    EXPECT_TRUE(*lies_in(dir / inside, dir / "a")) << inside;
  EXPECT_TRUE(*lies_in(dir / "a/b/f", dir / "link"));
  for (const std::string outside : {"", "a/..", "no", "a/no"})
    EXPECT_FALSE(*lies_in(dir / outside, dir / "a")) << outside;
}

TEST(Directory, RemoveTreeFollowsNoLinks) {
  const TempDir dir;
  fs::create_directories(dir / "tree/sub/deeper");
  fs::create_directory(dir / "outside");
  put(dir / "outside/precious", "p");
  dir.write("tree/sub/f", "x");
  fs::create_directory_symlink(dir / "outside", dir / "tree/sub/link");
  fs::create_symlink("nowhere", dir / "tree/dangling");
  ASSERT_TRUE(remove_tree(dir / "tree"));
  EXPECT_FALSE(*path_exists(dir / "tree"));
  EXPECT_EQ(get(dir / "outside/precious"), "p");
}

TEST(Directory, RemoveTreeRefusesALinkToADirectory) {
  const TempDir dir;
  fs::create_directory(dir / "outside");
  put(dir / "outside/precious", "p");
  fs::create_directory_symlink(dir / "outside", dir / "link");
  EXPECT_FALSE(remove_tree(dir / "link"));
  EXPECT_FALSE(remove_tree(dir / "link/"));
  EXPECT_EQ(get(dir / "outside/precious"), "p");
}

TEST(Directory, RemoveTreeSaysWhatItCannotRemove) {
  const TempDir dir;
  fs::create_directory(dir / "tree");
  dir.write("tree/f", "x");
  Syscalls stubborn = sys();
  stubborn.unlink = [](const char*) {
    errno = EPERM;
    return -1;
  };
  const ScopedSyscalls scope(stubborn);
  EXPECT_EQ(message_of(remove_tree(dir / "tree")), dir / "tree/f: cannot remove: Operation not permitted");
}

TEST(Directory, MakeDirectoryRefusesWhatIsThere) {
  const TempDir dir;
  ASSERT_TRUE(make_directory(dir / "d"));
  EXPECT_TRUE(*is_directory(dir / "d"));
  EXPECT_EQ(message_of(make_directory(dir / "d")), dir / "d: cannot create the directory: File exists");
  EXPECT_EQ(message_of(make_directory(dir / "a/b")),
            dir / "a/b: cannot create the directory in " + (dir / "a") + ": No such file or directory");
  EXPECT_TRUE(sync_directory(dir / "d"));
  EXPECT_FALSE(sync_directory(dir / "absent"));
  EXPECT_GT(*free_space(dir.path()), 0);
}

TEST(Rename, ReplacesNothing) {
  const TempDir dir;
  fs::create_directory(dir / "new");
  put(dir / "new/f", "new");
  fs::create_directory(dir / "old");
  EXPECT_EQ(message_of(rename_no_replace(dir / "new", dir / "old")),
            dir / "old: cannot move the finished output into place: File exists");
  ASSERT_TRUE(rename_no_replace(dir / "new", dir / "fresh"));
  EXPECT_EQ(get(dir / "fresh/f"), "new");
}

TEST(Rename, ReplacesNothingWhereTheFileSystemLacksTheFlag) {
  const TempDir dir;
  put(dir / "new", "new");
  put(dir / "old", "old");
  Syscalls plain = sys();
  plain.rename = [](const char* from, const char* to, unsigned flags) {
    if (flags == 0) return ::rename(from, to);
    errno = EINVAL;
    return -1;
  };
  const ScopedSyscalls scope(plain);
  EXPECT_FALSE(rename_no_replace(dir / "new", dir / "old"));
  EXPECT_EQ(get(dir / "old"), "old");
  ASSERT_TRUE(rename_no_replace(dir / "new", dir / "fresh"));
  EXPECT_EQ(get(dir / "fresh"), "new");
}

TEST(Rename, ExchangeSwapsTwoDirectories) {
  const TempDir dir;
  fs::create_directory(dir / "a");
  fs::create_directory(dir / "b");
  dir.write("a/f", "from a");
  put(dir / "b/f", "from b");
  const Status swapped = exchange_paths(dir / "a", dir / "b");
  if (!swapped && errno == EINVAL) GTEST_SKIP() << "the file system cannot exchange names";
  ASSERT_TRUE(swapped);
  EXPECT_EQ(get(dir / "a/f"), "from b");
  EXPECT_EQ(get(dir / "b/f"), "from a");
  EXPECT_EQ(message_of(exchange_paths(dir / "a", dir / "no")),
            dir / "no: cannot exchange with " + (dir / "a: No such file or directory"));
}

TEST(Paths, JoinParentAndBaseName) {
  EXPECT_EQ(path_join("a", "b"), "a/b");
  EXPECT_EQ(path_join("a/", "b"), "a/b");
  EXPECT_EQ(path_join("", "b"), "b");
  EXPECT_EQ(parent_path("a/b/"), "a");
  EXPECT_EQ(parent_path("b"), ".");
  EXPECT_EQ(parent_path("/b"), "/");
  EXPECT_EQ(parent_path("/"), "/");
  EXPECT_EQ(base_name("a/b/"), "b");
  EXPECT_EQ(base_name("b"), "b");
}

TEST(Paths, ANameFromMetadataMustStayInsideTheDirectory) {
  for (const char* good : {"a", "__0_0.distcp", "sharded/x.safetensors", "..a", "a..", ".metadata"})
    EXPECT_TRUE(is_safe_relative_path(good)) << good;
  for (const char* bad : {"", "/etc/passwd", "..", "../x", "a/../x", "a/..", ".", "./a", "a//b", "a/", "C:\\x", "a\\b"})
    EXPECT_FALSE(is_safe_relative_path(bad)) << bad;
  EXPECT_FALSE(is_safe_relative_path(std::string_view("a\0b", 3)));
}

TEST(Paths, ADanglingLinkExists) {
  const TempDir dir;
  fs::create_symlink("nowhere", dir / "link");
  EXPECT_TRUE(*path_exists(dir / "link"));
  EXPECT_FALSE(*path_exists(dir / "nowhere"));
  EXPECT_FALSE(*is_directory(dir / "link"));
}

// What cannot be looked at is not missing.
TEST(Paths, ALookThatFailsIsAnError) {
  const TempDir dir;
  dir.write("d/f", "x");
  static int code;
  static std::string unseen;
  static const auto failing = [](std::string_view path) { return path.find(unseen) != std::string_view::npos; };
  Syscalls calls = sys();
  static const Syscalls real = calls;
  calls.fstatat = [](int directory, const char* path, struct stat* out, int flags) {
    return failing(path) ? (errno = code, -1) : real.fstatat(directory, path, out, flags);
  };
  calls.statx = [](int directory, const char* path, int flags, unsigned mask, struct statx* out) {
    return failing(path) ? (errno = code, -1) : real.statx(directory, path, flags, mask, out);
  };
  calls.opendir = [](const char* path) -> DIR* { return failing(path) ? (errno = code, nullptr) : real.opendir(path); };
  calls.readlink = [](const char* path, char* buffer, std::size_t n) -> ssize_t {
    return failing(path) ? (errno = code, -1) : real.readlink(path, buffer, n);
  };
  calls.realpath = [](const char* path, char* resolved) -> char* {
    return failing(path) ? (errno = code, nullptr) : real.realpath(path, resolved);
  };
  const std::string d = dir / "d", f = dir / "d/f", other = dir / "other";
  const std::map<std::string, std::function<std::string()>> questions = {
      {"path_exists", [&] { return why(path_exists(f)); }},
      {"is_directory", [&] { return why(is_directory(f)); }},
      {"lies_in", [&] { return why(lies_in(f, dir.path())); }},
      {"lies_in, the directory", [&] { return why(lies_in(dir.path(), f)); }},
      {"is_mount_point", [&] { return why(is_mount_point(f)); }},
      {"real_path", [&] { return why(real_path(f)); }},
      {"by_own_name", [&] { return why(by_own_name(f + "/.")); }},
      {"may_be_listed", [&] { return why(may_be_listed(f)); }},
      {"entry_at", [&] { return why(entry_at(f)); }},
      {"node_at", [&] { return why(node_at(f)); }},
      {"look_at", [&] { return why(look_at(f)); }},
      {"list_directory", [&] { return why(list_directory(d)); }},
      {"list_tree", [&] { return why(list_tree(d)); }},
      {"remove_tree", [&] { return why(remove_tree(d)); }},
      {"replace_file", [&] { return why(replace_file(f, "new")); }},
      {"check_spares_inputs, of the output", [&] { return why(check_spares_inputs(f, {other})); }},
      {"check_spares_inputs, of an input", [&] { return why(check_spares_inputs(other, {f})); }},
      {"check_spares_inputs, inside an input", [&] { return why(check_spares_inputs(other, {d})); }},
      {"WatchedFiles", [&] { return why(WatchedFiles(std::vector<std::string>{f}).check(0)); }},
      {"leads_out", [&] { return why(leads_out(f, d)); }},
      {"files_of_manifest", [&] { return why(files_of_manifest(f)); }},
      {"model_code", [&] { return why(model_code(f)); }}};
  unseen = "d/f";
  put(other, "x");
  const ScopedSyscalls scoped(calls);
  for (const int error : {EIO, ESTALE, EMFILE, ETIMEDOUT, EINVAL})
    for (const auto& [name, ask] : questions) {
      code = error;
      unseen = name == "list_directory" ? "/d" : "d/f";
      EXPECT_NE(ask().find(std::strerror(error)), std::string::npos) << name << ": " << ask();
    }
  for (const int error : {ENOENT, ENOTDIR}) {
    code = error;
    unseen = "d/f";
    EXPECT_FALSE(*path_exists(f));
    EXPECT_FALSE(*is_directory(f));
    EXPECT_FALSE(*lies_in(f, d));
    EXPECT_FALSE(*is_mount_point(f));
    EXPECT_EQ(*real_path(f), "");
    EXPECT_FALSE(*node_at(f));
  }
  EXPECT_EQ(get(f), "x");
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
