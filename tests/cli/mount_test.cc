// Tests reshard mount through the kernel. Skipped on machines without FUSE.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <regex>
#include <thread>

#include "formats/open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/stand_in_server.h"
#include "tests/support/temp_dir.h"

namespace reshard::mount_test {
namespace {

using testing::HasSubstr;

void unmount(const std::string& directory) {
  if (::umount2(directory.c_str(), MNT_DETACH) != 0) (void)run_command({"/usr/bin/fusermount3", "-u", "-z", directory});
}

bool becomes_true(const std::function<bool()>& condition) {
  for (int i = 0; i < 500 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return condition();
}

// Returns whether a process has ended; a zombie counts as ended.
bool is_gone(pid_t process) {
  if (::kill(process, 0) != 0) return true;
  const std::string state = read_file("/proc/" + std::to_string(process) + "/stat");
  return state.find(") Z") != std::string::npos;
}

int error_of_reading(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY);
  if (fd < 0) return errno;
  char byte = 0;
  const ssize_t n = ::pread(fd, &byte, 1, 0);
  const int error = n < 0 ? errno : 0;
  ::close(fd);
  return error;
}

class Mount : public testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directory(seen_);
    const CommandResult r = mount(sample("tp8") + "/checkpoint", "hf");
    if (r.exit_code == 4 && reshard_cli({"doctor", "--json"}).out.find(R"("mount": "works")") == std::string::npos)
      GTEST_SKIP() << r.err;
    ASSERT_EQ(r.exit_code, 0) << r.err;
    end();
  }
  void TearDown() override { end(); }

  CommandResult mount(const std::string& source, const std::string& as, const std::vector<std::string>& more = {}) {
    return mounted(reshard_cli({"mount", source, seen_, "--as", as, "--background"}, more));
  }
  // Notes the process that a command has left in the background.
  CommandResult mounted(CommandResult r) {
    std::smatch found;
    process_ = std::regex_search(r.out, found, std::regex("process ([0-9]+)")) ? std::stoi(found[1]) : 0;
    return r;
  }
  // Mounts without --background, so the mount may not exist yet when this returns.
  void mount_in_foreground(const std::string& source, const std::string& as) {
    const std::string command = std::string(RESHARD_BINARY) + " mount " + source + " " + seen_ + " --as " + as + " > " +
                                (dir_ / "said") + " 2>&1 & echo $!";
    process_ = std::stoi(run_command({"/bin/sh", "-c", command}).out);
  }

  // Unmounts, whatever the result of the test.
  void end() {
    if (process_ == 0) return;
    ::kill(process_, SIGTERM);
    (void)becomes_true([&] { return is_gone(process_); });
    unmount(seen_);  // if the process was killed
    EXPECT_TRUE(becomes_true([&] { return is_gone(process_); }));
    process_ = 0;
  }

  TempDir dir_;
  std::string seen_ = dir_ / "seen";
  pid_t process_ = 0;
};

// The terminal's signal reaches only the parent of the process that plans in the background.
TEST(MountInBackground, ASignalWhilePlanningEndsBothProcesses) {
  const int server = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);  // accepts connections and never answers
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  ASSERT_TRUE(::bind(server, any, length) == 0 && ::listen(server, 8) == 0 && ::getsockname(server, any, &length) == 0);
  const TempDir dir;
  std::filesystem::create_directory(dir / "seen");
  const std::string url = "http://127.0.0.1:" + std::to_string(ntohs(address.sin_port)) + "/model.safetensors";
  const std::string script = std::string(RESHARD_BINARY) + " mount " + url + " " + (dir / "seen") +
                             " --as hf --background & p=$!; c=; for i in $(seq 500); do c=$(cat "
                             "/proc/$p/task/$p/children 2>&1); [ -z \"$c\" ] || break; sleep 0.02; done; sleep 0.2; "
                             "kill -INT $p; wait $p; echo \"code $?\"; kill -0 $c 2>&1 || echo gone";
  const CommandResult r = run_command({"/bin/sh", "-c", script}, 30);
  ::close(server);
  EXPECT_FALSE(r.timed_out);
  EXPECT_THAT(r.out, HasSubstr("code 130")) << r.err;
  EXPECT_THAT(r.out, HasSubstr("gone"));
}

TEST_F(Mount, ShowsTheTreeThatConvertWrites) {
  for (const char* as : {"hf", "bin", "dcp", "colossalai", "ranks", "megatron"}) {
    const std::string written = dir_ / as, source = sample("fsdp2_tp2_optim") + "/checkpoint";
    const CommandResult converted = reshard_cli({"convert", source, written, "--to", as, "-q"});
    ASSERT_EQ(converted.exit_code, 0) << converted.err;
    const CommandResult r = mount(source, as);
    ASSERT_EQ(r.exit_code, 0) << r.err;
    const auto expected = all_files(written);
    std::vector<std::thread> readers;
    for (int t = 0; t < 3; ++t) readers.emplace_back([&] { EXPECT_TRUE(all_files(seen_) == expected) << as; });
    for (std::thread& t : readers) t.join();
    end();
  }
}

TEST_F(Mount, ShowsACheckpointOfABucket) {
  std::filesystem::create_directories(dir_ / "served/bucket/run a+b");
  std::filesystem::copy(sample("fsdp2_tp2_optim") + "/checkpoint", dir_ / "served/bucket/run a+b/step=5",
                        std::filesystem::copy_options::recursive);
  std::filesystem::copy(sample("fsdp2_tp2_optim") + "/config.json", dir_ / "served/bucket/run a+b/config.json");
  const StandInServer server(dir_ / "served", {"--key", "id:s3cr3t"});
  const std::vector<std::string> key = {"AWS_ACCESS_KEY_ID=id", "AWS_SECRET_ACCESS_KEY=s3cr3t"};
  const std::string source = "s3://bucket/run a+b/step=5", written = dir_ / "written";
  for (const char* as : {"hf", "dcp"}) {
    const CommandResult converted = server.run({"convert", source, written, "--to", as, "--force"}, key);
    ASSERT_EQ(converted.exit_code, 0) << converted.err;
    const CommandResult r = mounted(server.run({"mount", source, seen_, "--as", as, "--background"}, key));
    ASSERT_EQ(r.exit_code, 0) << r.err;
    EXPECT_TRUE(all_files(seen_) == all_files(written)) << as;
    end();
  }
}

TEST_F(Mount, AnArchiveIsTheFileThatConvertWrites) {
  const std::string written = dir_ / "written.h5", source = sample("tp8") + "/checkpoint";
  ASSERT_EQ(reshard_cli({"convert", source, written, "--to", "hdf5", "-q"}).exit_code, 0);
  const CommandResult r = mount(source, "hdf5");
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const auto seen = all_files(seen_);
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_TRUE(seen.begin()->second == read_file(written));
}

TEST_F(Mount, IsReadAsACheckpoint) {
  const std::string source = sample("pp2_tp4") + "/checkpoint";
  ASSERT_EQ(mount(source, "dcp", {"--mesh", "dp_shard=2,tp=2"}).exit_code, 0);
  const CommandResult r = reshard_cli({"verify", seen_, "--against", source});
  EXPECT_EQ(r.exit_code, 0) << r.out << r.err;
}

// What commands read of a manifest when they open a checkpoint is known without the tensors' digests.
TEST_F(Mount, IsOpenedWithoutReadingTheTensors) {
  const std::string source = sample("fsdp2_tp2_optim") + "/checkpoint";
  for (const char* as : {"hf", "ranks", "colossalai"}) {
    ASSERT_EQ(mount(source, as).exit_code, 0);
    const auto bytes_read = [&] {
      const std::string io = read_file("/proc/" + std::to_string(process_) + "/io");
      return std::stoll(io.substr(io.find("rchar: ") + 7));
    };
    const auto before = bytes_read();
    const CommandResult r = reshard_cli({"inspect", seen_});
    EXPECT_EQ(r.exit_code, 0) << r.err;
    EXPECT_THAT(r.out, HasSubstr("made from")) << as;  // from the manifest
    const auto opened = bytes_read();
    EXPECT_LT(opened - before, 100'000) << as;
    const std::string manifest = seen_ + "/reshard_manifest.json", text = read_file(manifest);
    EXPECT_THAT(text, HasSubstr("\"digest\"")) << as;
    EXPECT_GT(bytes_read() - opened, 400'000) << as;
    const int fd = ::open(manifest.c_str(), O_RDONLY);
    void* const mapped = ::mmap(nullptr, text.size(), PROT_READ, MAP_PRIVATE, fd, 0);
    ASSERT_NE(mapped, MAP_FAILED) << as;
    EXPECT_TRUE(std::string_view(static_cast<const char*>(mapped), text.size()) == text) << as;
    ::munmap(mapped, text.size());
    ::close(fd);
    end();
  }
}

TEST_F(Mount, CanBeMappedAndNotWritten) {
  ASSERT_EQ(mount(sample("tp8") + "/checkpoint", "hf").exit_code, 0);
  const std::string file = seen_ + "/model.safetensors";
  const std::string bytes = read_file(file);
  const int fd = ::open(file.c_str(), O_RDONLY);
  ASSERT_GE(fd, 0);
  void* const mapped = ::mmap(nullptr, bytes.size(), PROT_READ, MAP_PRIVATE, fd, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  EXPECT_TRUE(std::string_view(static_cast<const char*>(mapped), bytes.size()) == bytes);
  ::munmap(mapped, bytes.size());
  ::close(fd);
  EXPECT_EQ(::open(file.c_str(), O_RDWR), -1);
  EXPECT_EQ(errno, EROFS);
  EXPECT_EQ(::open((seen_ + "/new").c_str(), O_CREAT | O_WRONLY, 0600), -1);
  EXPECT_EQ(errno, EROFS);
  EXPECT_EQ(::unlink(file.c_str()), -1);
  EXPECT_EQ(errno, EROFS);
}

TEST_F(Mount, EndsWhenItIsToldToAlthoughFilesAreOpen) {
  const auto hangup = std::signal(SIGHUP, SIG_DFL);  // the tests may run under nohup
  for (const int signal : {SIGTERM, SIGHUP}) {
    ASSERT_EQ(mount(sample("tp8") + "/checkpoint", "hf").exit_code, 0);
    const int fd = ::open((seen_ + "/model.safetensors").c_str(), O_RDONLY);
    ASSERT_GE(fd, 0);
    ::kill(process_, signal);
    EXPECT_TRUE(becomes_true([&] { return is_gone(process_); }));
    EXPECT_TRUE(std::filesystem::is_empty(seen_));
    char byte = 0;
    EXPECT_EQ(::pread(fd, &byte, 1, 0), -1);
    ::close(fd);
  }
  std::signal(SIGHUP, hangup);
}

TEST_F(Mount, EndsWhenItIsUnmounted) {
  ASSERT_EQ(mount(sample("tp8") + "/checkpoint", "hf").exit_code, 0);
  const CommandResult r = run_command({"/usr/bin/fusermount3", "-u", seen_});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_TRUE(becomes_true([&] { return is_gone(process_); }));
}

TEST_F(Mount, WhatAKilledProcessLeavesIsNamed) {
  const std::string source = sample("tp8") + "/checkpoint";
  ASSERT_EQ(mount(source, "hf").exit_code, 0);
  const pid_t first = process_;
  const CommandResult twice = reshard_cli({"mount", source, seen_, "--as", "hf"});
  EXPECT_EQ(twice.exit_code, 2);
  EXPECT_THAT(twice.err, HasSubstr("already a mount point"));
  ::kill(first, SIGKILL);
  struct statfs s {};
  EXPECT_TRUE(becomes_true([&] { return ::statfs(seen_.c_str(), &s) != 0 && errno == ENOTCONN; }));
  const CommandResult again = reshard_cli({"mount", source, seen_, "--as", "hf"});
  EXPECT_EQ(again.exit_code, 5);
  EXPECT_THAT(again.err, HasSubstr("stale mount of a process that has ended; remove it: fusermount3 -u " + seen_));
}

TEST_F(Mount, ASourceThatChangesIsAnErrorAndNotOldBytes) {
  copy_sample("tp8", dir_.path());
  ASSERT_EQ(mount(dir_ / "checkpoint", "hf", {"--log", dir_ / "log"}).exit_code, 0);
  const std::string file = seen_ + "/model.safetensors";
  const int fd = ::open(file.c_str(), O_RDONLY);
  ASSERT_GE(fd, 0);
  EXPECT_FALSE(read_file(file).empty());  // the kernel has cached it now
  const std::string changed = dir_ / "checkpoint/__3_0.distcp";
  std::filesystem::last_write_time(changed, std::filesystem::last_write_time(changed) + std::chrono::seconds(1));
  EXPECT_EQ(error_of_reading(file), EIO);
  char byte = 0;
  EXPECT_TRUE(becomes_true([&] { return ::pread(fd, &byte, 1, 0) == -1 && errno == EIO; }));
  ::close(fd);
  EXPECT_THAT(read_file(dir_ / "log"), HasSubstr("__3_0.distcp: the file has changed since it was opened"));
}

// A trainer that continues saves the next step next to this one.
TEST_F(Mount, ANewerStepChangesNothing) {
  for (const std::string run : {"deepspeed/z3_frozen_tied", "megatron/dist_tp2_optim"}) {
    const std::string source = dir_ / std::filesystem::path(run).filename().string();
    std::filesystem::copy(test_data(run), source, std::filesystem::copy_options::recursive);
    const CommandResult r = mount(source, "hf");
    ASSERT_EQ(r.exit_code, 0) << r.err;
    for (const char* const name : {"latest", "latest_checkpointed_iteration.txt"})
      if (const std::string latest = source + "/" + name; *path_exists(latest)) write_file(latest, "7");
    EXPECT_EQ(error_of_reading(seen_ + "/model.safetensors"), 0) << run;
    end();
  }
}

// Sizes are listed from the metadata; if items differ, the items count.
TEST_F(Mount, ItemsOfAnotherTypeThanTheMetadataSays) {
  copy_sample("tp8", dir_.path());
  const std::string checkpoint = dir_ / "checkpoint";
  std::string bytes = read_file(checkpoint + "/.metadata");
  constexpr std::string_view kStored = "\bbfloat16", kClaimed = "\afloat16";  // with their lengths
  const std::size_t at = bytes.find(kStored), frame = bytes.find('\x95') + 1;
  ASSERT_NE(at, std::string::npos);
  ASSERT_NE(bytes[frame], 0);
  bytes.replace(at, kStored.size(), kClaimed);
  --bytes[frame];  // the length of its frame
  write_file(checkpoint + "/.metadata", bytes);
  const std::string written = dir_ / "written";
  const CommandResult converted = reshard_cli({"convert", checkpoint, written, "--to", "hf"});
  ASSERT_EQ(converted.exit_code, 0) << converted.err;
  EXPECT_THAT(converted.out, HasSubstr("is stored as bfloat16, the metadata says float16"));
  mount_in_foreground(checkpoint, "hf");
  ASSERT_TRUE(becomes_true([&] { return read_file(dir_ / "said").find("mounted") != std::string::npos; }));
  EXPECT_TRUE(all_files(seen_) == all_files(written));
}

// The listing before and after waiting is the same: the checkpoint is mounted once.
TEST_F(Mount, WhoOpensAFileWaitsUntilItCanBeRead) {
  const std::string source = sample("fsdp2_tp2_optim") + "/checkpoint";
  for (const char* as : {"hf", "dcp", "hdf5"}) {
    const std::string written = dir_ / (std::string("written-") + as);
    ASSERT_EQ(reshard_cli({"convert", source, written, "--to", as, "-q"}).exit_code, 0);
    mount_in_foreground(source, as);
    struct stat first {};
    ASSERT_TRUE(becomes_true([&] {
      struct statfs s {};
      constexpr auto kFuseMagic = 0x65735546;  // linux/magic.h, FUSE_SUPER_MAGIC
      return ::statfs(seen_.c_str(), &s) == 0 && s.f_type == kFuseMagic && ::stat(seen_.c_str(), &first) == 0;
    }));
    const auto seen = all_files(seen_);
    if (std::filesystem::is_directory(written)) {
      EXPECT_TRUE(seen == all_files(written)) << as;
    } else {
      EXPECT_TRUE(seen.size() == 1 && seen.begin()->second == read_file(written)) << as;
    }
    struct stat then {};
    ASSERT_EQ(::stat(seen_.c_str(), &then), 0);
    EXPECT_EQ(then.st_dev, first.st_dev) << as;
    end();
  }
}

TEST_F(Mount, WhatIsWrongBehindTheMetadataEndsIt) {
  copy_sample("tp8", dir_.path());
  std::string bytes = read_file(dir_ / "checkpoint/__3_0.distcp");
  bytes.replace(0, 4, "none");  // the first item's magic number
  write_file(dir_ / "checkpoint/__3_0.distcp", bytes);
  mount_in_foreground(dir_ / "checkpoint", "hf");
  EXPECT_TRUE(becomes_true([&] { return is_gone(process_); }));
  EXPECT_THAT(read_file(dir_ / "said"), HasSubstr("__3_0.distcp@0x0: expected a torch.save archive"));
  EXPECT_TRUE(std::filesystem::is_empty(seen_));
  const CommandResult r = mount(dir_ / "checkpoint", "hf");
  EXPECT_EQ(r.exit_code, 3) << r.err;
}

TEST_F(Mount, DamageIsAnErrorThatSaysWhere) {
  copy_sample("tp8", dir_.path());
  const std::string damaged = dir_ / "checkpoint/__0_0.distcp";
  std::string bytes = read_file(damaged);
  {
    const auto open = open_checkpoint(dir_ / "checkpoint");
    ASSERT_TRUE(open);
    const Catalog& catalog = open->reader->catalog();
    const auto number = catalog.find("tok_embeddings.weight");
    ASSERT_TRUE(number && open->reader->locate({*number}, 1, dir_.path()));
    const FragmentList& fragments = catalog.tensors()[*number].fragments;
    for (std::size_t i = 0; i < fragments.size(); ++i)
      if (const Extent& e = fragments.extent(i); catalog.file_path(e.file) == damaged)
        bytes[static_cast<std::size_t>(e.offset + e.length / 2)] ^= 1;
  }
  write_file(damaged, bytes);
  ASSERT_EQ(mount(dir_ / "checkpoint", "hf", {"--check", "--log", dir_ / "log"}).exit_code, 0);
  const std::string file = seen_ + "/model.safetensors";
  const int fd = ::open(file.c_str(), O_RDONLY);
  ASSERT_GE(fd, 0);
  int failed = 0;
  struct stat s {};
  ::fstat(fd, &s);
  for (off_t at = 0; at < s.st_size; at += 4096) {
    char byte = 0;
    if (::pread(fd, &byte, 1, at) == 1) continue;
    EXPECT_EQ(errno, EIO);
    ++failed;
  }
  ::close(fd);
  EXPECT_GT(failed, 0);
  const std::string said = read_file(dir_ / "log");
  EXPECT_THAT(said, HasSubstr("reshard: error: model.safetensors@0x"));
  EXPECT_THAT(said, HasSubstr("__0_0.distcp@0x"));
  EXPECT_THAT(said, HasSubstr("tensor '"));
  EXPECT_THAT(said, HasSubstr("expected CRC-32"));
}

// These are refused before FUSE is needed.
TEST(MountRefuses, PlacesThatWouldHideSomething) {
  const TempDir dir;
  copy_sample("tp8", dir.path());
  std::filesystem::create_directory(dir / "empty");
  std::filesystem::create_directory(dir / "checkpoint/inside");
  const auto refused = [&](const std::string& where, int code, const std::string& why) {
    const CommandResult r = reshard_cli({"mount", dir / "checkpoint", where, "--as", "hf"});
    EXPECT_EQ(r.exit_code, code) << where;
    EXPECT_THAT(r.err, HasSubstr(why)) << where;
  };
  refused(dir / "nowhere", 5, "No such file or directory; expected an empty directory");
  refused(dir.write("file", "x"), 2, "is not a directory");
  refused(dir / "checkpoint", 2, "which this job reads");
  refused(dir / "checkpoint/inside", 2, "is inside " + (dir / "checkpoint"));
  refused(dir.path(), 2, "contains " + (dir / "checkpoint"));
  dir.write("full/file", "x");
  refused(dir / "full", 2, "not empty; its files would be hidden");
  const CommandResult view = reshard_cli({"mount", dir / "checkpoint", dir / "empty", "--as", "hdf5-view"});
  EXPECT_EQ(view.exit_code, 4) << view.err;
  EXPECT_THAT(view.err, HasSubstr("stores no tensor data of its own"));
  const CommandResult packed =
      reshard_cli({"mount", dir / "checkpoint", dir / "empty", "--as", "hdf5", "--codec", "zstd:3"});
  EXPECT_EQ(packed.exit_code, 4) << packed.err;
  EXPECT_THAT(packed.err, HasSubstr("drop the compression"));
}

}  // namespace
}  // namespace reshard::mount_test
