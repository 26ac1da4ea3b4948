// Tests resuming: after a run that was killed, filled the disk or was interrupted, the next run gives the output of an
// undisturbed run and does not repeat finished work.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>
#include <utility>

#include "formats/open.h"
#include "formats/registry.h"
#include "lib/base/syscalls.h"
#include "lib/convert/conversion.h"
#include "tests/support/checkpoints.h"
#include "tests/support/local_ranks.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::resume_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::StartsWith;
using Files = std::map<std::string, std::string>;

constexpr Index kGroup = 30'000;

// The calls that change the disk, and what happens to one of them.
enum class End { kNone, kKill, kNoSpace };
std::atomic<Index> changes{0};  // calls that change a file or a directory
std::atomic<Index> bytes_written{0}, bytes_read{0};
std::atomic<Index> end_at{0};  // the number of the change that ends the run
End how = End::kNone;
Syscalls real;

bool fails() {
  if (++changes != end_at || how == End::kNone) return false;
  if (how == End::kKill) ::kill(::getpid(), SIGKILL);
  errno = ENOSPC;
  return true;
}

Syscalls counted() {
  Syscalls c = real;
  c.pread = [](int fd, void* buffer, std::size_t n, off_t offset) {
    bytes_read += static_cast<Index>(n);
    return real.pread(fd, buffer, n, offset);
  };
  c.pwrite = [](int fd, const void* buffer, std::size_t n, off_t offset) -> ssize_t {
    if (fails()) return -1;
    bytes_written += static_cast<Index>(n);
    return real.pwrite(fd, buffer, n, offset);
  };
  c.fdatasync = [](int) { return fails() ? -1 : 0; };
  c.fsync = [](int) { return fails() ? -1 : 0; };
  c.rename = [](const char* from, const char* to, unsigned flags) {
    return fails() ? -1 : real.rename(from, to, flags);
  };
  c.unlink = [](const char* path) { return fails() ? -1 : real.unlink(path); };
  c.rmdir = [](const char* path) { return fails() ? -1 : real.rmdir(path); };
  c.mkdir = [](const char* path, mode_t mode) { return fails() ? -1 : real.mkdir(path, mode); };
  return c;
}

struct Wish {
  std::string to = "dcp", mesh = "dp_shard=3";
  std::optional<DType> dtype = std::nullopt;
  int ranks = 1, threads = 1;
  Strategy strategy = Strategy::kDirect;
  Resume resume = Resume::kAuto;
  std::atomic<bool>* interrupt = nullptr;  // set when half of the work is done
  std::function<void(Index done)> meanwhile = nullptr;
};

class ResumeTest : public testing::Test {
 protected:
  ResumeTest() {
    real = sys();
    scoped_.emplace(counted());
    end(End::kNone, 0);
    TensorValues values;
    std::mt19937 random(5);
    for (int i = 0; i < 24; ++i) {
      const Index rows = i == 7 ? 6800 : 30 + static_cast<Index>(random() % 100);  // one of two slabs
      TensorValue v{DType::kFloat32, {rows, 40}, std::string(static_cast<std::size_t>(rows) * 160, '\0')};
      for (char& c : v.bytes) c = static_cast<char>(random() & 0x3f);
      values["layers." + std::to_string(i) + ".w"] = std::move(v);
    }
    write_dcp(values, source_, Mesh({{"dp_shard", 4}}));
  }

  static void end(End what, Index at) {
    how = what;
    end_at = at;
    changes = bytes_written = bytes_read = 0;
  }

  Status convert_on(const Wish& wish, Transport* ranks) {
    auto open = TRY(open_checkpoint(source_));
    ConversionOptions o;
    o.source_path = source_;
    if (!wish.mesh.empty()) o.placement.mesh = TRY(Mesh::parse(wish.mesh));
    o.typing.dtype = wish.dtype;
    o.resume = wish.resume;
    o.group_bytes = kGroup;
    o.run.threads = wish.threads;
    o.run.memory = Index{1} << 30;
    o.run.ranks = ranks;
    o.run.strategy = wish.strategy;
    if (!ranks || ranks->rank() == 0) o.on_note = [this](const std::string& note) { notes_.push_back(note); };
    if (wish.interrupt) {
      o.run.interrupt = wish.interrupt;
      o.run.progress = [&wish](Index done) {
        if (done > 600'000) *wish.interrupt = true;
      };
    }
    if (wish.meanwhile && (!ranks || ranks->rank() == 0)) o.run.progress = wish.meanwhile;
    const auto conversion = TRY(Conversion::prepare(*open.reader, *TRY(find_format(wish.to)), std::move(o)));
    const auto outcome = TRY(conversion->run({out_}));
    if (!ranks || ranks->rank() == 0) outcome_ = outcome;
    return {};
  }
  Status convert(const Wish& wish) {
    notes_.clear();
    if (wish.ranks == 1) return convert_on(wish, nullptr);
    return run_local_ranks(wish.ranks, [&](Transport& ranks) { return convert_on(wish, &ranks); });
  }
  // Converts and is killed at this change. Returns false if the run ended before.
  bool convert_killed(const Wish& wish, Index at) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      end(End::kKill, at);
      ::_exit(convert(wish) ? 0 : 1);
    }
    int status = 0;
    ::waitpid(pid, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    return WIFSIGNALED(status);
  }

  Files files() const { return fs::is_directory(out_) ? all_files(out_) : Files{{"", read_file(out_)}}; }
  void clear() const {
    fs::remove_all(out_);
    fs::remove_all(work_);
    fs::remove_all(out_ + ".publishing");
  }
  // Runs undisturbed, remembers the output, and returns the number of disk changes.
  Index expect(const Wish& wish) {
    end(End::kNone, 0);
    const Status status = convert(wish);
    EXPECT_TRUE(status) << status.error().message();
    expected_ = files();
    checksums_ = outcome_.checksums;
    whole_ = bytes_written;
    const Index all = changes;
    clear();
    return all;
  }
  // Resumes and expects the same output. Returns whether anything was left to resume.
  bool expect_continued(const Wish& wish) {
    const bool left = fs::exists(work_);
    end(End::kNone, 0);
    const Status status = convert(wish);
    if (!status) ADD_FAILURE() << status.error().message();
    if (!status) return false;
    EXPECT_TRUE(files() == expected_);
    EXPECT_EQ(outcome_.checksums, checksums_);
    EXPECT_FALSE(fs::exists(work_));
    EXPECT_EQ(notes_.size(), left ? 1u : 0u);
    return left && notes_.size() == 1 && notes_[0].starts_with("resuming");
  }

  TempDir dir_;
  std::string source_ = dir_ / "ck", out_ = dir_ / "out", work_ = dir_ / "out.partial";
  std::vector<std::string> notes_;
  Conversion::Outcome outcome_;
  Files expected_;
  Index checksums_ = 0, whole_ = 0;

 private:
  std::optional<ScopedSyscalls> scoped_;
};

TEST_F(ResumeTest, KilledAnywhereTheNextRunGoesOnFromThere) {
  for (const Wish& wish : {Wish{}, Wish{.to = "hdf5", .mesh = ""}}) {
    const Index all = expect(wish), step = in_soak() ? 1 : std::max<Index>(1, all / (9 / every_nth(2)));
    EXPECT_GT(checksums_, 24);
    Index continued = 0, runs = 0, saved = 0;
    for (Index at = 1; at <= all; at += step) {
      SCOPED_TRACE(wish.to + ", killed at " + std::to_string(at) + " of " + std::to_string(all));
      clear();
      ASSERT_TRUE(convert_killed(wish, at));
      if (fs::exists(out_)) {  // only the directory was left to remove
        EXPECT_TRUE(files() == expected_);
        continue;
      }
      ++runs;
      if (!expect_continued(wish)) continue;
      ++continued;
      saved += whole_ - bytes_written;
      if (at > all * 3 / 4) {
        EXPECT_LT(bytes_written, whole_ / 2);
      }
    }
    clear();
    std::printf("%s: killed at %lld of %lld changes, %lld of the next runs went on from there\n", wish.to.c_str(),
                static_cast<long long>(runs), static_cast<long long>(all), static_cast<long long>(continued));
    EXPECT_GT(continued, runs / 2);
    EXPECT_GT(saved, continued * whole_ / 4);
  }
}

TEST_F(ResumeTest, KilledOverAndOverItEndsAllTheSame) {
  Wish wish;
  wish.threads = 3;
  const Index all = expect(wish);
  std::mt19937 random(3);
  Index kills_in_all = 0;
  for (int round = 0; round < (in_soak() ? 500 : 3); ++round) {
    clear();
    int kills = 0;
    while (!fs::exists(out_) && convert_killed(wish, 20 + static_cast<Index>(random()) % all) && kills < 30) ++kills;
    EXPECT_LT(kills, 30);
    kills_in_all += kills;
    EXPECT_TRUE(files() == expected_);
  }
  std::printf("%lld kills\n", static_cast<long long>(kills_in_all));
}

TEST_F(ResumeTest, AnyNumberOfRanksGoesOn) {
  const std::pair<int, int> kRanks[] = {{3, 3}, {3, 1}, {1, 3}, {2, 4}};
  for (const Strategy strategy : {Strategy::kDirect, Strategy::kExchange}) {
    for (const auto& [before, after] : kRanks) {
      SCOPED_TRACE(std::string(strategy_name(strategy)) + " " + std::to_string(before) + " then " +
                   std::to_string(after));
      Wish first{.ranks = before, .strategy = strategy}, second{.ranks = after, .strategy = strategy};
      const Index all = expect(first);
      ASSERT_TRUE(convert_killed(first, all * 3 / 5));
      ASSERT_TRUE(expect_continued(second)) << testing::PrintToString(notes_);
      EXPECT_LT(bytes_written, whole_ * 4 / 5);
      clear();
    }
  }
}

TEST_F(ResumeTest, WhatChangedIsNamedAndBegunAnew) {
  const Wish wish;
  const Index all = expect(wish);
  ASSERT_TRUE(convert_killed(wish, all / 2));
  const std::string kept = dir_ / "kept";
  fs::copy(work_, kept, fs::copy_options::recursive);
  const auto again = [&] {
    clear();
    fs::copy(kept, work_, fs::copy_options::recursive);
    end(End::kNone, 0);
  };
  const auto expect_anew = [&](Wish changed, const std::string& what) {
    again();
    changed.resume = Resume::kRequire;
    const Status refused = convert(changed);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code(), ErrorCode::kUsage);
    EXPECT_THAT(refused.error().message(), testing::AllOf(StartsWith(work_ + ": cannot resume: "), HasSubstr(what)));
    EXPECT_TRUE(fs::exists(work_));
    changed.resume = Resume::kAuto;
    ASSERT_TRUE(convert(changed));
    ASSERT_EQ(notes_.size(), 1u);
    EXPECT_THAT(notes_[0], testing::AllOf(StartsWith("removed " + work_ + " of an interrupted run, and started over: "),
                                          HasSubstr(what)));
    clear();
  };
  expect_anew({.mesh = "dp_shard=2"}, "--mesh");
  expect_anew({.to = "hdf5", .mesh = ""}, "--to");
  expect_anew({.dtype = DType::kBFloat16}, "--dtype");
  // Converts again, and with Resume::kNever.
  again();
  EXPECT_TRUE(expect_continued(wish));
  again();
  ASSERT_TRUE(convert({.resume = Resume::kNever}));
  EXPECT_EQ(notes_, std::vector<std::string>{"removed " + work_ + " of an interrupted run"});
  EXPECT_EQ(bytes_written, whole_);
  EXPECT_TRUE(files() == expected_);
  clear();
  const Status nothing = convert({.resume = Resume::kRequire});
  ASSERT_FALSE(nothing);
  EXPECT_THAT(nothing.error().message(), HasSubstr("nothing to resume"));
  // A file of the output is missing or too short.
  again();
  fs::resize_file(work_ + "/__0_0.distcp", 100);
  ASSERT_TRUE(convert(wish));
  EXPECT_THAT(notes_.at(0), HasSubstr("__0_0.distcp is missing or too short"));
  EXPECT_TRUE(files() == expected_);
  // A file of the source was rewritten.
  for (const auto& entry : fs::directory_iterator(source_))
    if (entry.path().extension() == ".distcp") fs::last_write_time(entry.path(), fs::file_time_type::clock::now());
  expect_anew(wish, "source file __0_0.distcp");
}

TEST_F(ResumeTest, ADamagedJournalCostsWhatItNoLongerTells) {
  const Wish wish;
  const Index all = expect(wish);
  ASSERT_TRUE(convert_killed(wish, all * 2 / 3));
  const std::string kept = dir_ / "kept";
  fs::copy(work_, kept, fs::copy_options::recursive);
  const std::string journal = read_file(kept + "/.reshard-partial");
  ASSERT_GT(journal.size(), 2000u);
  const std::size_t step = in_soak() ? 7 : journal.size() / 6;
  for (std::size_t at = 3; at < journal.size(); at += step)
    for (const bool cut : {false, true}) {
      clear();
      fs::copy(kept, work_, fs::copy_options::recursive);
      std::string damaged = journal.substr(0, cut ? at : journal.size());
      if (!cut) damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
      write_file(work_ + "/.reshard-partial", damaged);
      SCOPED_TRACE((cut ? "cut at " : "damaged at ") + std::to_string(at));
      end(End::kNone, 0);
      const Status status = convert(wish);
      ASSERT_TRUE(status) << status.error().message();
      ASSERT_TRUE(files() == expected_);
      ASSERT_EQ(outcome_.checksums, checksums_);
    }
}

// Changes the leftover of a killed run in every way that keeps its files long enough: the next run gives the usual
// output or fails. Covers formats with replicas and with a single file, one rank and several.
TEST_F(ResumeTest, WhatWasChangedMeanwhileIsNotPublished) {
  std::mt19937 random(9);
  const std::string kept = dir_ / "kept";
  for (const Wish& wish :
       {Wish{}, Wish{.mesh = "dp_replicate=2,dp_shard=2"}, Wish{.to = "hdf5", .mesh = ""},
        Wish{.to = "torch_checkpointing"}, Wish{.to = "orbax"}, Wish{.dtype = DType::kBFloat16, .ranks = 3}}) {
    SCOPED_TRACE(wish.to + " " + wish.mesh + ", " + std::to_string(wish.ranks) + " ranks");
    const Index all = expect(wish);
    ASSERT_TRUE(convert_killed(wish, all * 2 / 3));
    fs::remove_all(kept);
    fs::copy(work_, kept, fs::copy_options::recursive);
    std::vector<std::string> files;
    for (const auto& [name, bytes] : all_files(kept))
      if (!bytes.empty()) files.push_back(name);
    Index noticed = 0;
    const auto expect_the_same = [&](const std::string& what, const std::function<void(const std::string&)>& change) {
      const std::string file = files[random() % files.size()];
      SCOPED_TRACE(what + " " + file);
      clear();
      fs::copy(kept, work_, fs::copy_options::recursive);
      change(work_ + "/" + file);
      end(End::kNone, 0);
      const Status status = convert(wish);
      ASSERT_TRUE(status) << status.error().message();
      ASSERT_TRUE(this->files() == expected_);
      ASSERT_EQ(outcome_.checksums, checksums_);
      EXPECT_FALSE(fs::exists(work_));
      noticed += std::any_of(notes_.begin(), notes_.end(),
                             [](const std::string& note) { return note.find("started over: ") != std::string::npos; });
    };
    const auto edit = [](const auto& change) {
      return [change](const std::string& path) {
        std::string bytes = read_file(path);
        change(bytes);
        write_file(path, bytes);
      };
    };
    for (int n = 0; n < (in_soak() ? 200 : 6); ++n) {
      for (const std::size_t most : {std::string::npos, std::size_t{20'000}})  // anywhere, and around the metadata
        expect_the_same("a bit of", edit([&](std::string& bytes) {
                          bytes[random() % std::min(most, bytes.size())] ^= static_cast<char>(1 << random() % 8);
                        }));
      expect_the_same("zeros in", edit([&](std::string& bytes) {
                        const std::size_t at = random() % bytes.size();
                        std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), (bytes.size() - at + 1) / 2, '\0');
                      }));
    }
    expect_the_same("a shorter", edit([](std::string& bytes) { bytes.resize(bytes.size() / 2); }));
    expect_the_same("a longer", edit([](std::string& bytes) { bytes += "more"; }));
    expect_the_same("a reversed", edit([](std::string& bytes) { std::reverse(bytes.begin(), bytes.end()); }));
    files.erase(std::find(files.begin(), files.end(), ".reshard-partial"));
    expect_the_same("no", [](const std::string& path) { fs::remove(path); });
    EXPECT_GT(noticed, 2);
    // A hard link and a symbolic link: the file that they refer to is not written to.
    const std::string elsewhere = dir_ / "elsewhere";
    for (const bool is_link : {false, true}) {
      fs::remove(elsewhere);
      std::string before;
      expect_the_same("another name of", [&](const std::string& path) {
        before = read_file(path);
        fs::copy_file(path, elsewhere);
        fs::remove(path);
        is_link ? fs::create_symlink(elsewhere, path) : fs::create_hard_link(elsewhere, path);
      });
      EXPECT_EQ(read_file(elsewhere), before);
    }
    clear();
  }
}

// A way to convert a training state that has an optimizer.
struct SampleWish {
  const Format* format;
  std::string mesh;
  Container container = Container::kSafetensors;
};

// Returns the notes of the run.
Result<std::vector<std::string>> convert_sample(const SampleWish& wish, const std::string& out) {
  const std::string source = sample("fsdp2_tp2_optim");
  const auto open = TRY(open_checkpoint(source + "/checkpoint"));
  std::vector<std::string> notes;
  ConversionOptions o;
  o.source_path = source + "/checkpoint";
  o.config_path = source + "/config.json";
  o.typing.dtype = DType::kBFloat16;
  o.container = wish.container;
  o.group_bytes = kGroup;
  o.run.threads = 1;
  o.run.memory = Index{1} << 30;
  o.on_note = [&](const std::string& note) { notes.push_back(note); };
  if (!wish.mesh.empty()) o.placement.mesh = TRY(Mesh::parse(wish.mesh));
  TRY(TRY(Conversion::prepare(*open.reader, *wish.format, std::move(o)))->run({out}));
  return notes;
}

// Says where files differ.
void expect_files(const Files& expected, const Files& got) {
  EXPECT_EQ(got.size(), expected.size());
  for (const auto& [name, bytes] : expected) {
    const std::string& other = got.at(name);
    if (other == bytes) continue;
    const auto at = std::mismatch(bytes.begin(), bytes.end(), other.begin(), other.end()).first - bytes.begin();
    ADD_FAILURE() << name << " of " << bytes.size() << " bytes differs at " << at;
  }
}

// Returns the system calls in use, except that a file that grows is filled with the byte 0xa5.
Syscalls filling_calls() {
  static const auto fill = [](int fd, off_t from, off_t to) {
    const std::string bytes(static_cast<std::size_t>(std::max<off_t>(0, to - from)), '\xa5');
    return real.pwrite(fd, bytes.data(), bytes.size(), from) < 0 ? -1 : 0;
  };
  static const auto size = [](int fd) {
    struct stat st {};
    real.fstat(fd, &st);
    return st.st_size;
  };
  Syscalls c = sys();
  c.fallocate = [](int fd, int, off_t, off_t length) { return fill(fd, size(fd), length); };
  c.ftruncate = [](int fd, off_t length) {
    const off_t before = size(fd);
    return real.ftruncate(fd, length) != 0 ? -1 : fill(fd, before, length);
  };
  return c;
}

// A killed run leaves files of full length, in which any byte may be changed before the next run. No digest covers the
// bytes that belong to no tensor. Shown of each format, its containers and meshes: the killed run's new files are full
// of 0xa5 where the others' are full of zeros. Then all of them change, so that the next run has to start over.
TEST_F(ResumeTest, NoByteOfAKilledRunThatIsNotDataIsPublished) {
  const auto check = [&](const SampleWish& wish) {
    const std::string usual = dir_ / "usual";
    end(End::kNone, 0);
    if (const auto done = convert_sample(wish, usual); !done) {
      EXPECT_EQ(done.error().code(), ErrorCode::kUnsupported) << done.error().message();
      return false;
    }
    const Files expected = fs::is_directory(usual) ? all_files(usual) : Files{{"", read_file(usual)}};
    const Index all = changes;
    fs::remove_all(usual);
    const pid_t child = ::fork();
    if (child == 0) {
      const ScopedSyscalls filling(filling_calls());
      end(End::kKill, all * 2 / 3);
      ::_exit(convert_sample(wish, out_) ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status));
    const std::string kept = dir_ / "kept";
    fs::rename(work_, kept);
    for (const bool is_changed : {false, true}) {
      clear();
      fs::copy(kept, work_, fs::copy_options::recursive);
      for (const auto& [name, bytes] : all_files(kept))
        if (is_changed && name != ".reshard-partial") write_file(work_ + "/" + name, std::string(bytes.size(), '\xa5'));
      fs::create_directories(work_ + "/made/meanwhile");
      end(End::kNone, 0);
      const auto notes = convert_sample(wish, out_);
      EXPECT_TRUE(notes) << notes.error().message();
      if (!notes) return true;
      EXPECT_THAT(*notes, testing::Contains(StartsWith("resuming")));
      EXPECT_EQ(notes->back().starts_with("started over"), is_changed);
      EXPECT_FALSE(fs::exists(out_ + "/made"));
      expect_files(expected, files());
    }
    fs::remove_all(kept);
    clear();
    return true;
  };
  for (const Format* format : sampled(formats(), 3)) {
    if (!format->lay_out) continue;
    int tried = 0;
    for (const std::string mesh : {"dp_replicate=2,dp_shard=3,tp=2", "tp=4", "pp=2", ""})
      for (const Container container : {Container::kSafetensors, Container::kTorchSave}) {
        if (!mesh.empty() && !format->takes_mesh()) continue;
        if (container == Container::kTorchSave && !format->takes_container) continue;
        if (tried > 0 && !mesh.empty() && !in_soak()) continue;
        SCOPED_TRACE(std::string(format->name) + " " + mesh);
        tried += check({format, mesh, container}) ? 1 : 0;
      }
    EXPECT_GT(tried, 0) << format->name;
  }
}

TEST_F(ResumeTest, WhatWasChangedMeanwhileIsLeftWhereResumingIsRequired) {
  const Wish wish{.resume = Resume::kRequire};
  const Index all = expect({});
  ASSERT_TRUE(convert_killed({}, all * 2 / 3));
  const std::string file = work_ + "/__0_0.distcp";
  std::string bytes = read_file(file);
  std::fill_n(bytes.begin() + 6000, 4000, 'x');
  write_file(file, bytes);
  end(End::kNone, 0);
  const Status status = convert(wish);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code(), ErrorCode::kUsage);
  EXPECT_THAT(status.error().message(),
              testing::AllOf(StartsWith(work_ + ": cannot resume: the data that the killed run wrote of tensor '"),
                             HasSubstr("has changed since")));
  EXPECT_TRUE(read_file(file) == bytes);
  EXPECT_FALSE(fs::exists(out_));
}

TEST_F(ResumeTest, AFullDiskLeavesWhatIsFinished) {
  const Wish wish;
  const Index all = expect(wish);
  int kept = 0;
  for (Index at = 1; at < all; at += all / 9) {
    SCOPED_TRACE("no space at " + std::to_string(at) + " of " + std::to_string(all));
    clear();
    end(End::kNoSpace, at);
    const Status status = convert(wish);
    if (status) continue;  // the call could fail without harm
    if (status.error().message().find("the new checkpoint is complete in " + out_) != std::string::npos) {
      EXPECT_TRUE(files() == expected_);
      continue;
    }
    const bool left = fs::exists(work_);
    EXPECT_EQ(left, status.error().message().find("The finished part is kept in " + work_) != std::string::npos)
        << status.error().message();
    EXPECT_THAT(status.error().message(), HasSubstr("No space left on device"));
    EXPECT_EQ(expect_continued(wish), left);
    kept += left ? 1 : 0;
  }
  EXPECT_GT(kept, 3);
}

TEST_F(ResumeTest, AnInterruptedRunLeavesWhatIsFinished) {
  std::atomic<bool> interrupt{false};
  expect({});
  end(End::kNone, 0);
  const Status status = convert({.interrupt = &interrupt});
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code(), ErrorCode::kIo);
  EXPECT_EQ(status.error().message(), "interrupted. The finished part is kept in " + work_ +
                                          ": rerun the same command to resume, or add --resume never to start over");
  const Index before = bytes_written;
  EXPECT_TRUE(expect_continued({}));
  EXPECT_LT(before + bytes_written, whole_ + 20'000);  // nearly everything that was written was finished
}

TEST_F(ResumeTest, WhatIsWrongWithTheSourceLeavesNothing) {
  expect({});
  const std::string file = source_ + "/__3_0.distcp";
  std::string bytes = read_file(file);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
  write_file(file, bytes);
  const Status status = convert({});
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code(), ErrorCode::kCorrupt);
  EXPECT_FALSE(fs::exists(work_));
}

// Checksums cannot show it, because the pieces of both versions have valid ones.
TEST_F(ResumeTest, ASourceThatChangesMeanwhileGivesNoOutput) {
  const std::string file = source_ + "/__3_0.distcp";
  const auto replaced = [&] {
    fs::copy_file(file, file + ".new");
    fs::rename(file + ".new", file);
  };
  const auto written_to = [&] { fs::last_write_time(file, fs::last_write_time(file) + std::chrono::seconds(1)); };
  const auto grown = [&] { fs::resize_file(file, fs::file_size(file) + 1); };
  for (const auto& change : std::initializer_list<std::function<void()>>{replaced, written_to, grown}) {
    for (const int ranks : {1, 3}) {
      bool is_done = false;
      const Status status = convert({.ranks = ranks, .meanwhile = [&](Index done) {
                                       if (done > 200'000 && !std::exchange(is_done, true)) change();
                                     }});
      ASSERT_FALSE(status);
      EXPECT_THAT(status.error().message(), HasSubstr(file + ": changed while it was read"));
      EXPECT_FALSE(fs::exists(out_));
      EXPECT_FALSE(fs::exists(work_));
    }
  }
}

TEST_F(ResumeTest, ASourceThatIsRemovedWhenItWasReadIsNoLoss) {
  Index all = 0;
  ASSERT_TRUE(convert({.meanwhile = [&](Index done) { all = done; }}));
  expected_ = files();
  clear();
  ASSERT_TRUE(convert({.meanwhile = [&](Index done) {
    if (done == all) fs::remove_all(source_);
  }}));
  EXPECT_FALSE(fs::exists(source_));
  EXPECT_TRUE(files() == expected_);
}

}  // namespace
}  // namespace reshard::resume_test
