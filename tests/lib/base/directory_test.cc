// Tests directories, paths, and files that are replaced or renamed.
#include <gtest/gtest.h>
#include <linux/fs.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <functional>
#include <map>

#include "lib/base/file.h"
#include "lib/base/output_guard.h"
#include "lib/base/syscalls.h"
#include "lib/base/text.h"
#include "lib/checkpoint/model_code.h"
#include "lib/checkpoint/side_files.h"
#include "lib/source/watched_files.h"
#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard::directory_test {
namespace {

namespace fs = std::filesystem;

template <class T>
std::string why(const Result<T>& result) {
  return result.has_value() ? "no error" : result.error().message();
}

std::string message_of(const Status& s) { return s ? "fine" : s.error().message(); }

TEST(ReplaceFile, MakesAndReplacesAndLeavesNothingBeside) {
  const TempDir dir;
  ASSERT_TRUE(replace_file(dir / "f", "one"));
  ASSERT_TRUE(replace_file(dir / "f", "two, longer"));
  EXPECT_EQ(read_file(dir / "f"), "two, longer");
  EXPECT_EQ(list_directory(dir.path())->size(), 1u);
}

TEST(ReplaceFile, AnErrorLeavesTheOldOneAsItWas) {
  const TempDir dir;
  write_file(dir / "f", "old");
  Syscalls broken = sys();
  broken.rename = [](const char*, const char*, unsigned) {
    errno = EIO;
    return -1;
  };
  const ScopedSyscalls scope(broken);
  EXPECT_EQ(message_of(replace_file(dir / "f", "new")), dir / "f: cannot replace: Input/output error");
  EXPECT_EQ(read_file(dir / "f"), "old");
  EXPECT_EQ(list_directory(dir.path())->size(), 1u);
}

TEST(ReplaceFile, ReplacesNothingUnlessTold) {
  const TempDir dir;
  write_file(dir / "f", "old");
  EXPECT_FALSE(replace_file(dir / "f", "new", false));
  EXPECT_EQ(read_file(dir / "f"), "old");
  ASSERT_TRUE(replace_file(dir / "g", "new", false));
  EXPECT_EQ(read_file(dir / "g"), "new");
  EXPECT_EQ(list_directory(dir.path())->size(), 2u);
}

TEST(ReplaceFile, WritesThroughALinkAndLeavesADeviceWhatItIs) {
  const TempDir dir;
  write_file(dir / "f", "old, and longer");
  fs::create_symlink("f", dir / "link");
  ASSERT_TRUE(replace_file(dir / "link", "new"));
  EXPECT_TRUE(fs::is_symlink(dir / "link"));
  EXPECT_EQ(read_file(dir / "f"), "new");
  fs::create_symlink("/dev/full", dir / "full");
  EXPECT_EQ(message_of(replace_file(dir / "full", "new")), dir / "full: cannot write: No space left on device");
  EXPECT_TRUE(fs::is_symlink(dir / "full"));
}

TEST(Directory, ListingIsSortedAndFollowsLinks) {
  const TempDir dir;
  write_file(dir / "b", "12345");
  write_file(dir / ".a", "");
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
    EXPECT_TRUE(*is_at_or_below(dir / inside, dir / "a")) << inside;
  EXPECT_TRUE(*is_at_or_below(dir / "a/b/f", dir / "link"));
  for (const std::string outside : {"", "a/..", "no", "a/no"})
    EXPECT_FALSE(*is_at_or_below(dir / outside, dir / "a")) << outside;
}

TEST(Directory, RemoveTreeFollowsNoLinks) {
  const TempDir dir;
  fs::create_directories(dir / "tree/sub/deeper");
  fs::create_directory(dir / "outside");
  write_file(dir / "outside/precious", "p");
  dir.write("tree/sub/f", "x");
  fs::create_directory_symlink(dir / "outside", dir / "tree/sub/link");
  fs::create_symlink("nowhere", dir / "tree/dangling");
  ASSERT_TRUE(remove_tree(dir / "tree"));
  EXPECT_FALSE(*path_exists(dir / "tree"));
  EXPECT_EQ(read_file(dir / "outside/precious"), "p");
}

TEST(Directory, RemoveTreeRefusesALinkToADirectory) {
  const TempDir dir;
  fs::create_directory(dir / "outside");
  write_file(dir / "outside/precious", "p");
  fs::create_directory_symlink(dir / "outside", dir / "link");
  EXPECT_FALSE(remove_tree(dir / "link"));
  EXPECT_FALSE(remove_tree(dir / "link/"));
  EXPECT_EQ(read_file(dir / "outside/precious"), "p");
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
  write_file(dir / "new/f", "new");
  fs::create_directory(dir / "old");
  EXPECT_EQ(message_of(rename_no_replace(dir / "new", dir / "old")),
            dir / "old: cannot move the finished output into place: File exists");
  ASSERT_TRUE(rename_no_replace(dir / "new", dir / "fresh"));
  EXPECT_EQ(read_file(dir / "fresh/f"), "new");
}

TEST(Rename, ReplacesNothingWhereTheFileSystemLacksTheFlag) {
  const TempDir dir;
  write_file(dir / "new", "new");
  write_file(dir / "old", "old");
  Syscalls plain = sys();
  plain.rename = [](const char* from, const char* to, unsigned flags) {
    if (flags == 0) return ::rename(from, to);
    errno = EINVAL;
    return -1;
  };
  const ScopedSyscalls scope(plain);
  EXPECT_FALSE(rename_no_replace(dir / "new", dir / "old"));
  EXPECT_EQ(read_file(dir / "old"), "old");
  ASSERT_TRUE(rename_no_replace(dir / "new", dir / "fresh"));
  EXPECT_EQ(read_file(dir / "fresh"), "new");
}

TEST(Rename, ExchangeSwapsTwoDirectories) {
  const TempDir dir;
  fs::create_directory(dir / "a");
  fs::create_directory(dir / "b");
  dir.write("a/f", "from a");
  write_file(dir / "b/f", "from b");
  const Status swapped = exchange_paths(dir / "a", dir / "b");
  if (!swapped && errno == EINVAL) GTEST_SKIP() << "the file system cannot exchange names";
  ASSERT_TRUE(swapped);
  EXPECT_EQ(read_file(dir / "a/f"), "from b");
  EXPECT_EQ(read_file(dir / "b/f"), "from a");
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
      {"is_at_or_below", [&] { return why(is_at_or_below(f, dir.path())); }},
      {"is_at_or_below, the directory", [&] { return why(is_at_or_below(dir.path(), f)); }},
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
  write_file(other, "x");
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
    EXPECT_FALSE(*is_at_or_below(f, d));
    EXPECT_FALSE(*is_mount_point(f));
    EXPECT_EQ(*real_path(f), "");
    EXPECT_FALSE(*node_at(f));
  }
  EXPECT_EQ(read_file(f), "x");
}

}  // namespace
}  // namespace reshard::directory_test
