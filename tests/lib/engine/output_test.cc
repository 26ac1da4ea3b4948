#include "lib/engine/output.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "lib/base/sys.h"
#include "lib/device/crc32.h"
#include "lib/engine/pattern_source.h"
#include "lib/plan/plan.h"
#include "lib/transport/collectives.h"
#include "lib/transport/local.h"
#include "tests/support/layouts.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// One file "data" of fragments, and "index" beside it, which holds the checksum of each fragment's extent.
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

// Eight bytes, in one run.
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
  return output.write(list, FragmentIndex(list), {{0}, {static_cast<Index>(bytes.size())}}, 1, as_bytes(bytes),
                      scratch);
}

Result<std::unique_ptr<Output>> finished(const std::string& path, Target& target, bool replace = false) {
  auto output = TRY(Output::create(path, target, replace));
  TRY(write_all(*output, target, "abcdefgh"));
  TRY(output->commit());
  return output;
}

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> out;
  for (const auto& e : fs::directory_iterator(directory)) out.push_back(e.path().filename().string());
  std::sort(out.begin(), out.end());
  return out;
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
  auto output = Output::create(dir / "out", target, false);
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
  { ASSERT_TRUE(Output::create(dir / "out", target, false)); }
  EXPECT_EQ(names_in(dir.path()), Names{});
}

TEST(Output, IsNotCommittedWhereBytesAreMissing) {
  const TempDir dir;
  TestTarget target = small_target();
  {
    auto output = Output::create(dir / "out", target, false);
    ASSERT_TRUE(output);
    ASSERT_TRUE(write_all(**output, target, "abcd"));
    const Status s = (*output)->commit();
    ASSERT_FALSE(s.has_value());
    EXPECT_EQ(s.error().code(), ErrorCode::kInternal);
    EXPECT_EQ(s.error().message(), "data@0x0: was not written completely");
  }
  EXPECT_EQ(names_in(dir.path()), Names{});
}

TEST(Output, TakesADestinationWithASlash) {
  const TempDir dir;
  TestTarget target = small_target();
  ASSERT_TRUE(finished(dir / "out//", target));
  EXPECT_EQ(names_in(dir.path()), Names{"out"});
}

TEST(Output, AddsAFileOnce) {
  const TempDir dir;
  TestTarget target = small_target();
  auto output = Output::create(dir / "out", target, false);
  ASSERT_TRUE(output);
  ASSERT_TRUE((*output)->add_file("config.json", "{}"));
  EXPECT_FALSE((*output)->add_file("config.json", "{}"));
  EXPECT_FALSE((*output)->add_file("data", "{}"));
}

TEST(Output, NeedsItsParentDirectory) {
  const TempDir dir;
  TestTarget target = small_target();
  const auto r = Output::create(dir / "no/out", target, false);
  ASSERT_FALSE(r.has_value());
  EXPECT_EQ(r.error().code(), ErrorCode::kIo);
}

TEST(Output, SaysWhenARankDoesNotSeeWhatRankZeroMade) {
  const TempDir dir;
  TestTarget target = small_target();
  const Status status = run_local_ranks(2, [&](Transport& ranks) -> Status {
    const auto output = TRY(
        Output::create(dir / ("out" + std::to_string(ranks.rank())), target, false, Output::Space::kReserved, &ranks));
    return barrier(&ranks);
  });
  ASSERT_FALSE(status.has_value());
  EXPECT_THAT(status.error().message(), HasSubstr("out1.partial: rank 0 made it, but it is not to be seen from here"));
  EXPECT_EQ(names_in(dir.path()), Names{});
}

// ---- an existing destination

TEST(Output, DoesNotReplaceUnlessTold) {
  const TempDir dir;
  TestTarget target = small_target();
  fs::create_directory(dir / "out");
  expect_usage(Output::create(dir / "out", target, false), dir / "out: the destination exists; --force replaces it");
  EXPECT_EQ(names_in(dir.path()), Names{"out"});
}

TEST(Output, ReplacesACheckpointOrAnEmptyDirectory) {
  for (const char* file : {".metadata", "__0_0.distcp", "model.safetensors", "reshard_manifest.json", ""}) {
    const TempDir dir;
    TestTarget target = small_target();
    fs::create_directory(dir / "out");
    if (*file) dir.write(std::string("out/") + file, "old");
    const auto output = finished(dir / "out", target, true);
    ASSERT_TRUE(output) << output.error().message();
    EXPECT_EQ(names_in(dir.path()), Names{"out"});
    EXPECT_EQ(names_in(dir / "out"), (Names{"data", "index"})) << file;
  }
}

TEST(Output, ReplacesNothingElse) {
  const TempDir dir;
  TestTarget target = small_target();
  const std::string refusal = ": the destination is neither a checkpoint nor empty; it will not be replaced";
  dir.write("home/thesis.tex", "years of work");
  expect_usage(Output::create(dir / "home", target, true), dir / "home" + refusal);
  dir.write("file", "words");
  expect_usage(Output::create(dir / "file", target, true), dir / "file" + refusal);
  dir.write("real/.metadata", "old");
  fs::create_symlink(dir / "real", dir / "link");
  expect_usage(Output::create(dir / "link", target, true), dir / "link" + refusal);
  EXPECT_EQ(names_in(dir.path()), (Names{"file", "home", "link", "real"}));
}

TEST(Output, KeepsTheOldOneUntilTheNewOneIsThere) {
  const TempDir dir;
  TestTarget target = small_target();
  dir.write("out/.metadata", "old");
  {
    auto output = Output::create(dir / "out", target, true);
    ASSERT_TRUE(output);
    EXPECT_EQ(text_of(dir / "out/.metadata"), "old");
  }
  EXPECT_EQ(text_of(dir / "out/.metadata"), "old");
  EXPECT_EQ(names_in(dir.path()), Names{"out"});
}

// ---- what a killed run left

TEST(Output, RemovesWhatAKilledRunLeftAndSaysSo) {
  const TempDir dir;
  TestTarget target = small_target();
  dir.write("out.partial/.reshard-partial", "");
  dir.write("out.partial/data", "half");
  const auto output = finished(dir / "out", target);
  ASSERT_TRUE(output) << output.error().message();
  EXPECT_TRUE((*output)->removed_leftover());
  EXPECT_EQ(names_in(dir.path()), Names{"out"});
  EXPECT_EQ(text_of(dir / "out/data"), "abcdefgh");
  EXPECT_FALSE((*finished(dir / "other", target))->removed_leftover());
}

TEST(Output, LeavesSomebodyElsesDirectoryAlone) {
  const TempDir dir;
  TestTarget target = small_target();
  dir.write("out.partial/notes", "mine");
  expect_usage(Output::create(dir / "out", target, true),
               dir / "out.partial: is in the way and was not made by reshard; move it elsewhere");
  EXPECT_EQ(text_of(dir / "out.partial/notes"), "mine");
}

TEST(Output, LeavesAFileOrALinkInTheWayAlone) {
  const TempDir dir;
  TestTarget target = small_target();
  dir.write("a.partial", "mine");
  const auto file = Output::create(dir / "a", target, false);
  ASSERT_FALSE(file.has_value());
  EXPECT_EQ(file.error().message(), dir / "a.partial: is in the way and is not a directory");
  dir.write("real/.reshard-partial", "");
  fs::create_symlink(dir / "real", dir / "b.partial");
  EXPECT_FALSE(Output::create(dir / "b", target, false).has_value());
  EXPECT_EQ(names_in(dir / "real"), Names{".reshard-partial"});
}

TEST(Output, IsNotTakenFromARunThatLives) {
  const TempDir dir;
  TestTarget target = small_target();
  auto first = Output::create(dir / "out", target, false);
  ASSERT_TRUE(first);
  expect_usage(Output::create(dir / "out", target, false), dir / "out.partial: another reshard is writing there now");
  ASSERT_TRUE(write_all(**first, target, "abcdefgh"));
  ASSERT_TRUE((*first)->commit());
  EXPECT_EQ(text_of(dir / "out/data"), "abcdefgh");
}

// ---- faults

TEST(Output, IsNotThereWhenTheDiskFails) {
  const auto fail = [](auto change) {
    const TempDir dir;
    TestTarget target = small_target();
    dir.write("out/.metadata", "old");
    {
      auto output = Output::create(dir / "out", target, true);
      ASSERT_TRUE(output);
      ASSERT_TRUE(write_all(**output, target, "abcdefgh"));
      SysCalls calls = sys();
      change(calls);
      const ScopedSysCalls scoped(calls);
      const Status s = (*output)->commit();
      ASSERT_FALSE(s.has_value());
      EXPECT_EQ(s.error().code(), ErrorCode::kIo);
      EXPECT_THAT(s.error().message(), testing::EndsWith(std::strerror(EIO)));
    }
    EXPECT_EQ(names_in(dir.path()), Names{"out"});
    EXPECT_EQ(text_of(dir / "out/.metadata"), "old");
  };
  fail([](SysCalls& c) { c.fdatasync = [](int) { return errno = EIO, -1; }; });
  fail([](SysCalls& c) { c.fsync = [](int) { return errno = EIO, -1; }; });
  fail([](SysCalls& c) { c.pwrite = [](int, const void*, std::size_t, off_t) -> ssize_t { return errno = EIO, -1; }; });
  fail([](SysCalls& c) { c.rename = [](const char*, const char*, unsigned) { return errno = EIO, -1; }; });
}

// ---- writing

struct Placed {
  FragmentList list;
  Index size = 0;  // of the file
};

// The boxes of a random layout, row-major, transposed or with gaps between their rows, one after the other.
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

// The file as it should be, element by element.
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
  SysCalls calls = sys();
  calls.fdatasync = calls.fsync = [](int) { return 0; };
  const ScopedSysCalls scoped(calls);
  Rng rng(51);
  for (int n = 0; n < 150; ++n) {
    const TempDir dir;
    Dims shape = random_shape(rng);
    while (volume(shape) > 2000) *std::max_element(&shape[0], &shape[0] + shape.rank()) /= 2;
    constexpr DType kTypes[] = {DType::kUint8, DType::kBFloat16, DType::kFloat32, DType::kFloat64, DType::kComplex128};
    const DType dtype = kTypes[n % 5];
    const bool gaps = below(rng, 3) == 0;
    const Placed placed = random_fragments(rng, shape, byte_size(dtype), gaps);
    // Bytes in gaps belong to nobody, and have no checksum.
    TestTarget target(shape, placed.list, dtype, placed.size, !gaps);
    auto output = Output::create(dir / "out", target, false);
    ASSERT_TRUE(output) << output.error().message();
    const FragmentIndex index(placed.list);
    const Slabs slabs(shape, byte_size(dtype), 1 + below(rng, 3000), 1);
    std::vector<std::byte> scratch(static_cast<std::size_t>(File::kDirectUnit + 16 + below(rng, 500)));
    for (Index k = 0; k < slabs.count(); ++k) {
      const Box box = slabs.slab(k);
      std::vector<std::byte> data(static_cast<std::size_t>(volume(box) * byte_size(dtype)));
      fill_pattern("w", dtype, shape, box, data);
      const Status s = (*output)->write(placed.list, index, box, byte_size(dtype), data, scratch);
      ASSERT_TRUE(s) << s.error().message();
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
}  // namespace reshard
