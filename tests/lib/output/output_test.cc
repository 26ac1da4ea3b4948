#include "lib/output/output.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>

#include "lib/base/syscalls.h"
#include "lib/device/crc32.h"
#include "lib/plan/plan.h"
#include "lib/source/pattern_source.h"
#include "lib/transport/collectives.h"
#include "tests/support/layouts.h"
#include "tests/support/local_ranks.h"
#include "tests/support/temp_dir.h"

namespace reshard::output_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// A target with a file "data" of fragments and a file "index" with the checksum of each fragment's extent.
class TestTarget : public Target {
 public:
  TestTarget(const Dims& shape, const FragmentList& fragments, DType dtype, Index size, bool crcs) : crcs_(crcs) {
    Tensor t;
    t.name = "w";
    t.dtype = dtype;
    t.shape = shape;
    t.fragments = fragments;
    const Index count = static_cast<Index>(fragments.size());
    EXPECT_TRUE(catalog_.add(std::move(t)));
    catalog_.files = {{"data", size}, {"index", 4 * count}};
  }
  bool wants_crcs() const override { return crcs_; }
  Status seal(const PayloadCrc& crc, const EmitBytes& emit) const override {
    const FragmentList& list = catalog_.tensors()[0].fragments;
    for (std::size_t i = 0; i < list.size(); ++i) {
      const std::uint32_t sum = crcs_ ? crc(list.extent(i)) : 0;
      TRY(emit(1, static_cast<Index>(4 * i), std::as_bytes(std::span(&sum, 1))));
    }
    return {};
  }

 private:
  bool crcs_;
};

// Returns a target of eight bytes in one run.
TestTarget small_target() {
  FragmentList list(1);
  Fragment f;
  f.box = {{0}, {8}};
  f.strides = {1};
  f.extent = {0, 0, 8};
  list.add(f);
  return TestTarget({8}, list, DType::kUint8, 8, true);
}

Status write_all(Output& output, const Target& target, std::string_view bytes) {
  const FragmentList& list = target.catalog().tensors()[0].fragments;
  std::vector<std::byte> scratch(File::kDirectUnit + 64);
  TRY(output.write(list, FragmentIndex(list), {{0}, {static_cast<Index>(bytes.size())}}, 1, as_bytes(bytes), scratch));
  return {};
}

// Returns a destination that may be replaced if it is a checkpoint with these files.
OutputPath replacing(const std::string& path, std::vector<std::string> files = {"weights", "sub/more", "sub/link"}) {
  return {path, [files](const std::string&) -> Result<std::vector<std::string>> { return files; }};
}

Result<std::unique_ptr<Output>> finished(const OutputPath& destination, Target& target) {
  auto output = TRY(Output::create(destination, target));
  TRY(write_all(*output, target, "abcdefgh"));
  TRY(output->commit());
  return output;
}

std::string text_of(const std::string& path) {
  auto text = read_whole_file(path, 1 << 20);
  return text ? *text : text.error().message();
}

void expect_usage(const Result<std::unique_ptr<Output>>& r, const std::string& message) {
  ASSERT_FALSE(r.has_value());
  EXPECT_EQ(r.error().code(), ErrorCode::kUsage);
  EXPECT_EQ(r.error().message(), message);
}

using Names = std::vector<std::string>;

// ---- the directory

TEST(Output, IsNotThereUntilItIsComplete) {
  const TempDir dir;
  TestTarget target = small_target();
  auto output = Output::create({dir / "out"}, target);
  ASSERT_TRUE(output) << output.error().message();
  EXPECT_EQ(names_in(dir.path()), Names{"out.partial"});
  EXPECT_EQ(names_in(dir / "out.partial"), (Names{".reshard-partial", "data", "index"}));
  EXPECT_EQ(fs::file_size(dir / "out.partial/data"), 8u);
  ASSERT_TRUE(write_all(**output, target, "abcdefgh"));
  ASSERT_TRUE((*output)->add_file("config.json", "{}"));
  ASSERT_TRUE((*output)->commit());
  output->reset();
  EXPECT_EQ(names_in(dir.path()), Names{"out"});
  EXPECT_EQ(names_in(dir / "out"), (Names{"config.json", "data", "index"}));
  EXPECT_EQ(text_of(dir / "out/data"), "abcdefgh");
  EXPECT_EQ(text_of(dir / "out/config.json"), "{}");
  const std::uint32_t crc = crc32(0, as_bytes("abcdefgh"));
  EXPECT_EQ(text_of(dir / "out/index"), as_string(std::as_bytes(std::span(&crc, 1))));
}

TEST(Output, LeavesNothingWhenItIsGivenUp) {
  const TempDir dir;
  TestTarget target = small_target();
  { ASSERT_TRUE(Output::create({dir / "out"}, target)); }
  EXPECT_EQ(names_in(dir.path()), Names{});
}

TEST(Output, IsNotCommittedWhereBytesAreMissing) {
  const TempDir dir;
  TestTarget target = small_target();
  {
    auto output = Output::create({dir / "out"}, target);
    ASSERT_TRUE(output);
    ASSERT_TRUE(write_all(**output, target, "abcd"));
    const Status s = (*output)->commit();
    ASSERT_FALSE(s.has_value());
    EXPECT_EQ(s.error().code(), ErrorCode::kInternal);
    EXPECT_EQ(s.error().message(), "data@0x0: the data was not written completely");
  }
  EXPECT_EQ(names_in(dir.path()), Names{});
}

TEST(Output, TakesADestinationWithASlash) {
  const TempDir dir;
  TestTarget target = small_target();
  ASSERT_TRUE(finished({dir / "out//"}, target));
  EXPECT_EQ(names_in(dir.path()), Names{"out"});
}

TEST(Output, AddsAFileOnce) {
  const TempDir dir;
  TestTarget target = small_target();
  auto output = Output::create({dir / "out"}, target);
  ASSERT_TRUE(output);
  ASSERT_TRUE((*output)->add_file("config.json", "{}"));
  EXPECT_FALSE((*output)->add_file("config.json", "{}"));
  EXPECT_FALSE((*output)->add_file("data", "{}"));
}

TEST(Output, NeedsItsParentDirectory) {
  const TempDir dir;
  TestTarget target = small_target();
  const auto r = Output::create({dir / "no/out"}, target);
  ASSERT_FALSE(r.has_value());
  EXPECT_EQ(r.error().code(), ErrorCode::kIo);
}

TEST(Output, SaysWhenARankDoesNotSeeWhatRankZeroMade) {
  const TempDir dir;
  TestTarget target = small_target();
  const Status status = run_local_ranks(2, [&](Transport& ranks) -> Status {
    const auto output =
        TRY(Output::create({dir / ("out" + std::to_string(ranks.rank()))}, target, Output::Space::kReserved, &ranks));
    return barrier(&ranks);
  });
  ASSERT_FALSE(status.has_value());
  EXPECT_THAT(status.error().message(),
              HasSubstr("out1.partial: rank 0 created this directory, but this rank cannot see it"));
  EXPECT_EQ(names_in(dir.path()), Names{});
}

// ---- an existing destination

TEST(Output, DoesNotReplaceUnlessTold) {
  const TempDir dir;
  TestTarget target = small_target();
  fs::create_directory(dir / "out");
  expect_usage(Output::create({dir / "out"}, target), dir / "out: the destination exists; --force replaces it");
  EXPECT_EQ(names_in(dir.path()), Names{"out"});
}

TEST(Output, ReplacesACheckpointOrAnEmptyDirectory) {
  for (const bool is_empty : {false, true}) {
    const TempDir dir;
    TestTarget target = small_target();
    fs::create_directory(dir / "out");
    if (!is_empty) {
      dir.write("out/weights", "old");
      dir.write("out/sub/more", "old");
      dir.write("real", "kept");
      fs::create_symlink(dir / "real", dir / "out/sub/link");
    }
    const auto output = finished(replacing(dir / "out"), target);
    ASSERT_TRUE(output) << output.error().message();
    EXPECT_EQ(names_in(dir.path()), is_empty ? Names{"out"} : (Names{"out", "real"}));
    EXPECT_EQ(names_in(dir / "out"), (Names{"data", "index"}));
  }
}

TEST(Output, ReplacesNothingElse) {
  const TempDir dir;
  TestTarget target = small_target();
  const auto expect_refused = [&](const std::string& path, const std::string& why) {
    expect_usage(Output::create(replacing(path), target), path + ": " + why);
  };
  const auto is_none = [](const std::string& path) -> Result<std::vector<std::string>> {
    return unsupported(path + ": no checkpoint");
  };
  dir.write("home/thesis.tex", "years of work");
  expect_usage(Output::create({dir / "home", is_none}, target),
               dir / "home: the destination is neither empty nor a checkpoint; it will not be replaced (" +
                   (dir / "home: no checkpoint") + ")");
  dir.write("file", "words");
  expect_refused(dir / "file", "the destination is not a directory; it will not be replaced");
  dir.write("real/weights", "old");
  fs::create_symlink(dir / "real", dir / "link");
  expect_refused(dir / "link", "the destination is not a directory; it will not be replaced");
  const std::string holds = "the destination contains files that do not belong to its checkpoint: ";
  dir.write("mixed/weights", "old");
  dir.write("mixed/thesis.tex", "years of work");
  dir.write("mixed/photos/1.jpg", "a");
  dir.write("mixed/photos/2.jpg", "b");
  dir.write("mixed/sub/more", "old");
  dir.write("mixed/sub/notes", "mine");
  expect_refused(dir / "mixed", holds + "photos/, sub/notes, thesis.tex; it will not be replaced");
  // A directory, pipe or link in place of a file or directory also counts as foreign.
  fs::create_directories(dir / "odd/weights");
  ASSERT_EQ(::mkfifo((dir / "odd/sub").c_str(), 0600), 0);
  expect_refused(dir / "odd", holds + "sub, weights/; it will not be replaced");
  EXPECT_EQ(names_in(dir.path()), (Names{"file", "home", "link", "mixed", "odd", "real"}));
  EXPECT_EQ(names_in(dir / "mixed/photos"), (Names{"1.jpg", "2.jpg"}));
}

TEST(Output, DoesNotReplaceWhatTheJobReads) {
  const TempDir dir;
  TestTarget target = small_target();
  dir.write("out/weights", "old");
  dir.write("away/model", "mine");
  fs::create_symlink(dir / "out/weights", dir / "link");
  fs::create_symlink(dir / "out", dir / "away/other");
  for (const std::string input : {"out", "out/weights", "link", "away/other", "away/other/weights"}) {
    OutputPath to = replacing(dir / "out");
    to.inputs = {"", dir / "nowhere", dir / "away/model", dir / input};
    const bool is_itself = input == "out" || input == "away/other";
    expect_usage(Output::create(to, target), dir / "out: " + std::string(is_itself ? "is " : "contains ") +
                                                 (dir / input) + ", which this job reads; it will not be replaced");
  }
  // It is not removed even if it looks like the leftover of a killed run.
  dir.write("new.partial/.reshard-partial", "");
  dir.write("new.partial/weights", "mine");
  expect_usage(Output::create({dir / "new", nullptr, {dir / "new.partial"}}, target),
               dir / "new.partial: is " + (dir / "new.partial") + ", which this job reads; it will not be replaced");
  EXPECT_EQ(text_of(dir / "new.partial/weights"), "mine");
  EXPECT_EQ(text_of(dir / "out/weights"), "old");
  // Nothing is written into it either.
  OutputPath to = replacing(dir / "out");
  to.inputs = {dir.path()};
  expect_usage(Output::create(to, target),
               dir / "out: is inside " + dir.path() + ", which this job reads; choose a place outside it");
  to.inputs = {dir / "away/model"};
  const auto output = finished(to, target);
  ASSERT_TRUE(output) << output.error().message();
}

TEST(Output, KeepsTheOldOneUntilTheNewOneIsThere) {
  const TempDir dir;
  TestTarget target = small_target();
  dir.write("out/weights", "old");
  {
    auto output = Output::create(replacing(dir / "out"), target);
    ASSERT_TRUE(output);
    EXPECT_EQ(text_of(dir / "out/weights"), "old");
  }
  EXPECT_EQ(text_of(dir / "out/weights"), "old");
  EXPECT_EQ(names_in(dir.path()), Names{"out"});
}

// ---- a destination that changes while the job runs

// A target that is a single file of eight bytes.
class FileTarget : public Target, private SingleFile {
 public:
  FileTarget() {
    single_file_ = this;
    const TestTarget whole = small_target();
    EXPECT_TRUE(catalog_.add(whole.catalog().tensors()[0]));
    catalog_.files = {{"data", 8}};
  }
  bool wants_crcs() const override { return false; }
  Status seal(const PayloadCrc&, const EmitBytes&) const override { return {}; }

 private:
  Result<bool> is_own_file(const std::string& path) const override { return text_of(path) == "old"; }
  Status add_side_file(const std::string&, std::string_view) override { return {}; }
  Index sealed_size() const override { return 8; }
};

// Commits after calling `meanwhile`. Returns the error.
std::string commit_after(const OutputPath& to, Target& target, const std::function<void()>& meanwhile) {
  auto output = Output::create(to, target);
  if (!output) return output.error().message();
  EXPECT_TRUE(write_all(**output, target, "abcdefgh"));
  meanwhile();
  const Status status = (*output)->commit();
  return status ? "" : status.error().message();
}

TEST(Output, LeavesADestinationThatAppearedMeanwhile) {
  for (const bool is_file : {false, true}) {
    for (const bool replaces : {false, true}) {
      const TempDir dir;
      TestTarget directory = small_target();
      FileTarget file;
      Target& target = is_file ? static_cast<Target&>(file) : directory;
      const std::string message =
          commit_after(replaces ? replacing(dir / "out") : OutputPath{dir / "out"}, target, [&] {
            if (is_file)
              dir.write("out", "years of work");
            else
              dir.write("out/thesis.tex", "years of work");
          });
      const std::string made = dir / (is_file ? "out.partial/data" : "out.partial");
      EXPECT_THAT(message,
                  testing::AllOf(HasSubstr(dir / "out: "), testing::EndsWith("The finished output is at " + made +
                                                                             "; move it to its destination")));
      EXPECT_EQ(text_of(dir / (is_file ? "out" : "out/thesis.tex")), "years of work");
      EXPECT_EQ(names_in(dir / "out.partial"), is_file ? Names{"data"} : (Names{"data", "index"}));
      EXPECT_EQ(text_of(dir / "out.partial/data"), "abcdefgh");
      // It belongs to the user now, so the next run does not remove it.
      EXPECT_THAT(commit_after({dir / "out2"}, target, [] {}), "");
      fs::remove_all(dir / "out");
      EXPECT_THAT(commit_after({dir / "out"}, target, [] {}),
                  HasSubstr("out.partial: exists and was not created by reshard"));
    }
  }
}

TEST(Output, LeavesADestinationThatChangedMeanwhile) {
  const auto added = [](const TempDir& dir) { dir.write("out/thesis.tex", "years of work"); };
  const auto overwritten = [](const TempDir& dir) { dir.write("out/weights", "another"); };
  const auto exchanged = [](const TempDir& dir) {
    fs::rename(dir / "out", dir / "away");
    dir.write("out/weights", "old");
  };
  const auto linked = [](const TempDir& dir) {
    fs::rename(dir / "out", dir / "away");
    fs::create_directory_symlink(dir / "away", dir / "out");
  };
  for (const auto& change :
       std::initializer_list<std::function<void(const TempDir&)>>{added, overwritten, exchanged, linked}) {
    const TempDir dir;
    TestTarget target = small_target();
    dir.write("out/weights", "old");
    dir.write("out/sub/more", "old");
    std::map<std::string, std::string> before;
    const auto everything = [&] {
      std::map<std::string, std::string> out;
      for (const auto& e : fs::recursive_directory_iterator(dir.path()))
        if (e.path().string().find("out.partial") == std::string::npos)
          out[e.path().string()] = e.is_regular_file() ? text_of(e.path().string()) : "";
      return out;
    };
    const std::string message = commit_after(replacing(dir / "out"), target, [&] {
      change(dir);
      before = everything();
    });
    EXPECT_EQ(message, dir / "out: changed while this job ran, so it was not replaced. The finished output is at " +
                           (dir / "out.partial; move it to its destination"));
    EXPECT_EQ(everything(), before);
    EXPECT_EQ(names_in(dir / "out.partial"), (Names{"data", "index"}));
  }
}

// Something appears between the last check and the exchange.
TEST(Output, PutsBackWhatCameAtTheLastMoment) {
  static const TempDir* at;
  for (const bool is_file : {false, true}) {
    const TempDir dir;
    at = &dir;
    TestTarget directory = small_target();
    FileTarget file;
    Target& target = is_file ? static_cast<Target&>(file) : directory;
    dir.write(is_file ? "out" : "out/weights", "old");
    dir.write(is_file ? "mine" : "mine/thesis.tex", "years of work");
    Syscalls calls = sys();
    calls.rename = [](const char* from, const char* to, unsigned flags) {
      if (fs::exists(*at / "mine")) {
        fs::rename(*at / "out", *at / "away");
        fs::rename(*at / "mine", *at / "out");
      }
      return ::renameat2(AT_FDCWD, from, AT_FDCWD, to, flags);
    };
    const ScopedSyscalls scoped(calls);
    const std::string message = commit_after(replacing(dir / "out"), target, [] {});
    EXPECT_THAT(message, HasSubstr("out: changed while this job ran, so it was not replaced"));
    EXPECT_EQ(names_in(dir.path()), (Names{"away", "out", "out.partial"}));
    EXPECT_EQ(text_of(dir / (is_file ? "out" : "out/thesis.tex")), "years of work");
    EXPECT_EQ(names_in(dir / "out.partial"), is_file ? Names{"data"} : (Names{"data", "index"}));
  }
}

TEST(Output, ReplacesAFileOfItsKind) {
  const TempDir dir;
  FileTarget target;
  dir.write("out", "old");
  const auto output = finished(replacing(dir / "out"), target);
  ASSERT_TRUE(output) << output.error().message();
  EXPECT_EQ(text_of(dir / "out"), "abcdefgh");
  dir.write("words", "words");
  expect_usage(Output::create(replacing(dir / "words"), target),
               dir / "words: the destination is not a file of this format; it will not be replaced");
  EXPECT_EQ(names_in(dir.path()), (Names{"out", "words"}));
}

TEST(Output, NeedsNoOldOneAnyMore) {
  const TempDir dir;
  TestTarget target = small_target();
  dir.write("out/weights", "old");
  EXPECT_EQ(commit_after(replacing(dir / "out"), target, [&] { fs::remove_all(dir / "out"); }), "");
  EXPECT_EQ(names_in(dir.path()), Names{"out"});
  EXPECT_EQ(text_of(dir / "out/data"), "abcdefgh");
}

// A directory that cannot be listed does not count as empty.
TEST(Output, IsNotMadeWhereTheOldOneCannotBeListed) {
  const TempDir dir;
  TestTarget target = small_target();
  dir.write("out/thesis.tex", "years of work");
  {
    Syscalls calls = sys();
    calls.readdir = [](DIR*) -> dirent* { return errno = EIO, nullptr; };
    const ScopedSyscalls scoped(calls);
    const auto output = Output::create(replacing(dir / "out"), target);
    ASSERT_FALSE(output.has_value());
    EXPECT_EQ(output.error().code(), ErrorCode::kIo);
    EXPECT_EQ(output.error().message(), dir / "out: cannot list: " + std::strerror(EIO));
  }
  EXPECT_EQ(text_of(dir / "out/thesis.tex"), "years of work");
}

// ---- The leftover of a killed run

TEST(Output, RemovesWhatAKilledRunLeftAndSaysSo) {
  const TempDir dir;
  TestTarget target = small_target();
  dir.write("out.partial/.reshard-partial", "");
  dir.write("out.partial/data", "half");
  const auto output = finished({dir / "out"}, target);
  ASSERT_TRUE(output) << output.error().message();
  EXPECT_TRUE((*output)->removed_leftover());
  EXPECT_EQ(names_in(dir.path()), Names{"out"});
  EXPECT_EQ(text_of(dir / "out/data"), "abcdefgh");
  EXPECT_FALSE((*finished({dir / "other"}, target))->removed_leftover());
}

TEST(Output, LeavesSomebodyElsesDirectoryAlone) {
  const TempDir dir;
  TestTarget target = small_target();
  dir.write("out.partial/notes", "mine");
  expect_usage(Output::create({dir / "out"}, target),
               dir / "out.partial: exists and was not created by reshard; move it elsewhere");
  EXPECT_EQ(text_of(dir / "out.partial/notes"), "mine");
}

TEST(Output, LeavesAFileOrALinkInTheWayAlone) {
  const TempDir dir;
  TestTarget target = small_target();
  dir.write("a.partial", "mine");
  const auto file = Output::create({dir / "a"}, target);
  ASSERT_FALSE(file.has_value());
  EXPECT_EQ(file.error().message(), dir / "a.partial: exists and is not a directory");
  dir.write("real/.reshard-partial", "");
  fs::create_symlink(dir / "real", dir / "b.partial");
  EXPECT_FALSE(Output::create({dir / "b"}, target).has_value());
  EXPECT_EQ(names_in(dir / "real"), Names{".reshard-partial"});
}

TEST(Output, IsNotTakenFromARunThatLives) {
  const TempDir dir;
  TestTarget target = small_target();
  auto first = Output::create({dir / "out"}, target);
  ASSERT_TRUE(first);
  expect_usage(Output::create({dir / "out"}, target), dir / "out.partial: another reshard process is writing there");
  ASSERT_TRUE(write_all(**first, target, "abcdefgh"));
  ASSERT_TRUE((*first)->commit());
  EXPECT_EQ(text_of(dir / "out/data"), "abcdefgh");
}

// ---- faults

TEST(Output, IsNotThereWhenTheDiskFails) {
  const auto fail = [](auto change) {
    const TempDir dir;
    TestTarget target = small_target();
    dir.write("out/weights", "old");
    {
      auto output = Output::create(replacing(dir / "out"), target);
      ASSERT_TRUE(output);
      ASSERT_TRUE(write_all(**output, target, "abcdefgh"));
      Syscalls calls = sys();
      change(calls);
      const ScopedSyscalls scoped(calls);
      const Status s = (*output)->commit();
      ASSERT_FALSE(s.has_value());
      EXPECT_EQ(s.error().code(), ErrorCode::kIo);
      EXPECT_THAT(s.error().message(), testing::EndsWith(std::strerror(EIO)));
    }
    EXPECT_EQ(names_in(dir.path()), Names{"out"});
    EXPECT_EQ(text_of(dir / "out/weights"), "old");
  };
  fail([](Syscalls& c) { c.fdatasync = [](int) { return errno = EIO, -1; }; });
  fail([](Syscalls& c) { c.fsync = [](int) { return errno = EIO, -1; }; });
  fail([](Syscalls& c) { c.pwrite = [](int, const void*, std::size_t, off_t) -> ssize_t { return errno = EIO, -1; }; });
  fail([](Syscalls& c) { c.rename = [](const char*, const char*, unsigned) { return errno = EIO, -1; }; });
}

// ---- writing

struct Placed {
  FragmentList list;
  Index size = 0;  // size of the file
};

// Returns the boxes of a random layout, row-major, transposed or with gaps between their rows, one after the other.
Placed random_fragments(Rng& rng, const Dims& shape, Index element_bytes, bool gaps) {
  Placed out{FragmentList(shape.rank()), 7};
  const Mesh mesh = random_mesh(rng);
  Placement placement = random_placement(rng, mesh, shape);
  placement.stage = -1;
  for (Index rank = 0; rank < mesh.ranks(); ++rank) {
    const auto box = owned(mesh, placement, shape, rank);
    if (!box || box->empty() || !is_first_replica(mesh, placement, rank)) continue;
    Fragment f;
    f.box = *box;
    f.strides = row_major_strides(box->shape);
    if (shape.rank() == 2 && below(rng, 3) == 0) f.strides = {1, box->shape[0]};
    if (gaps)
      for (int d = 0; d < shape.rank(); ++d) f.strides[d] *= 2;
    Index reach = 1;
    for (int d = 0; d < shape.rank(); ++d) reach += (box->shape[d] - 1) * f.strides[d];
    f.extent = {0, out.size, reach * element_bytes};
    out.size += f.extent.length + 3;
    out.list.add(f);
  }
  return out;
}

// Returns the expected file, computed element by element.
std::string expected_file(const Dims& shape, const Placed& placed, DType dtype) {
  std::string file(static_cast<std::size_t>(placed.size), '\0');
  for (std::size_t i = 0; i < placed.list.size(); ++i) {
    const Fragment f = placed.list.get(i);
    for (Index n = 0; n < volume(f.box); ++n) {
      Box at{f.box.origin, Dims::filled(shape.rank(), 1)};
      Index rest = n, offset = 0;
      for (int d = shape.rank() - 1; d >= 0; --d) {
        at.origin[d] += rest % f.box.shape[d];
        offset += rest % f.box.shape[d] * f.strides[d];
        rest /= f.box.shape[d];
      }
      char* to = file.data() + f.extent.offset + offset * byte_size(dtype);
      fill_pattern("w", dtype, shape, at,
                   {reinterpret_cast<std::byte*>(to), static_cast<std::size_t>(byte_size(dtype))});
    }
  }
  return file;
}

TEST(Output, WritesAnyBoxesToAnyStrides) {
  Syscalls calls = sys();
  calls.fdatasync = calls.fsync = [](int) { return 0; };
  const ScopedSyscalls scoped(calls);
  Rng rng(51);
  for (int n = 0; n < 150; ++n) {
    const TempDir dir;
    Dims shape = random_shape(rng);
    while (volume(shape) > 2000) *std::max_element(&shape[0], &shape[0] + shape.rank()) /= 2;
    constexpr DType kTypes[] = {DType::kUint8, DType::kBFloat16, DType::kFloat32, DType::kFloat64, DType::kComplex128};
    const DType dtype = kTypes[n % 5];
    const bool gaps = below(rng, 3) == 0;
    const Placed placed = random_fragments(rng, shape, byte_size(dtype), gaps);
    // Bytes in gaps belong to no tensor and have no checksum.
    TestTarget target(shape, placed.list, dtype, placed.size, !gaps);
    auto output = Output::create({dir / "out"}, target);
    ASSERT_TRUE(output) << output.error().message();
    const FragmentIndex index(placed.list);
    const Slabs slabs(shape, byte_size(dtype), 1 + below(rng, 3000), 1);
    std::vector<std::byte> scratch(static_cast<std::size_t>(File::kDirectUnit + 16 + below(rng, 500)));
    for (Index k = 0; k < slabs.count(); ++k) {
      const Box box = slabs.slab(k);
      std::vector<std::byte> data(static_cast<std::size_t>(volume(box) * byte_size(dtype)));
      fill_pattern("w", dtype, shape, box, data);
      const auto s = (*output)->write(placed.list, index, box, byte_size(dtype), data, scratch);
      ASSERT_TRUE(s.has_value()) << s.error().message();
    }
    const Status s = (*output)->commit();
    ASSERT_TRUE(s) << s.error().message();
    const std::string expected = expected_file(shape, placed, dtype);
    ASSERT_TRUE(text_of(dir / "out/data") == expected) << to_string(shape) << " gaps " << gaps;
    if (gaps) continue;
    const std::string sums = text_of(dir / "out/index");
    for (std::size_t i = 0; i < placed.list.size(); ++i) {
      const Extent e = placed.list.extent(i);
      const std::uint32_t crc =
          crc32(0, as_bytes(expected).subspan(static_cast<std::size_t>(e.offset), static_cast<std::size_t>(e.length)));
      ASSERT_EQ(std::memcmp(sums.data() + 4 * i, &crc, 4), 0);
    }
  }
}

}  // namespace
}  // namespace reshard::output_test
