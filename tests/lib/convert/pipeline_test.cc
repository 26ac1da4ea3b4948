// Tests the whole pipeline on random tensors and layouts: write, open, read any part, convert, convert back.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <map>
#include <mutex>
#include <numeric>
#include <tuple>

#include "formats/dcp/dcp.h"
#include "formats/encoding/torch_archive.h"
#include "formats/hf/hf.h"
#include "formats/registry.h"
#include "lib/base/syscalls.h"
#include "lib/engine/run.h"
#include "lib/source/pattern_source.h"
#include "tests/support/checkpoints.h"
#include "tests/support/layouts.h"
#include "tests/support/must.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::pipeline_test {
namespace {

// Returns system calls without syncs, for hundreds of small checkpoints: power cuts are not tested here.
Syscalls without_sync() {
  Syscalls calls = sys();
  calls.fdatasync = [](int) { return 0; };
  calls.fsync = [](int) { return 0; };
  return calls;
}

#define ASSERT_OK(...)                                   \
  do {                                                   \
    const auto& ok = (__VA_ARGS__);                      \
    ASSERT_TRUE(ok.has_value()) << ok.error().message(); \
  } while (false)

std::map<std::string, std::string> contents(const std::string& directory) {
  std::map<std::string, std::string> out;
  for (const DirectoryEntry& e : must(list_directory(directory)))
    out[e.name] = must(read_whole_file(path_join(directory, e.name), Index{1} << 30));
  return out;
}

TargetBlob none_blob(const std::string& name) {
  return {name, {name}, torch_archive::object_item(std::string_view("\x80\x02N.", 4))};
}

Catalog catalog_of(const std::vector<TargetTensor>& tensors) {
  Catalog catalog;
  for (const TargetTensor& t : tensors) {
    Tensor tensor;
    tensor.name = t.name;
    tensor.dtype = t.dtype;
    tensor.shape = t.shape;
    EXPECT_TRUE(catalog.add(std::move(tensor)));
  }
  return catalog;
}

Status write_checkpoint(TensorSource& source, const Format& format, const LayoutRequest& request,
                        const std::string& destination, const RunOptions& options, std::vector<TensorProof>* proofs) {
  const auto target = TRY(format.lay_out(request));
  const Plan plan = TRY(make_plan(source.catalog(), target->catalog()));
  auto output = TRY(Output::create({destination}, *target));
  *proofs = TRY(copy_tensors(plan, source, target->catalog(), *output, options));
  return output->commit();
}

// Writes boxes of a few bytes to a few kilobytes, with as little scratch memory.
Status write_in_crumbs(TensorSource& source, const Format& format, const LayoutRequest& request,
                       const std::string& destination, Rng& rng) {
  const auto target = TRY(format.lay_out(request));
  auto output = TRY(Output::create({destination}, *target));
  std::vector<std::byte> slab, scratch(static_cast<std::size_t>(File::kDirectUnit + 16 + below(rng, 3000)));
  for (const Tensor& to : target->catalog().tensors()) {
    const std::size_t from = *source.catalog().find(to.name);
    const FragmentIndex index(to.fragments);
    const Index bytes = byte_size(to.dtype);
    const Slabs slabs(to.shape, bytes, 64 + below(rng, 3000), 1);
    std::vector<Index> order(static_cast<std::size_t>(slabs.count()));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    for (const Index k : order) {
      const Box box = slabs.slab(k);
      slab.resize(static_cast<std::size_t>(volume(box) * bytes));
      TRY(source.read(from, box, slab, scratch));
      TRY(output->write(to.fragments, index, box, bytes, slab, scratch));
    }
  }
  TRY(source.finish(scratch, nullptr));
  return output->commit();
}

struct Opened {
  std::unique_ptr<Reader> reader;
  std::unique_ptr<FileSource> source;
};

Result<Opened> open_all(const Format& format, const std::string& path, const std::string& spool) {
  Opened out;
  out.reader = TRY(open_with(format, path));
  std::vector<std::size_t> all(out.reader->catalog().tensors().size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  TRY(out.reader->locate(all, 1, spool));
  TRY(validate(out.reader->catalog()));
  out.source = std::make_unique<FileSource>(out.reader->catalog(), out.reader->files());
  return out;
}

// Returns whether these are the elements of a box of the synthetic tensor.
bool is_pattern(const Tensor& t, const Box& box, Bytes elements) {
  std::vector<std::byte> expected(elements.size());
  fill_pattern(t.name, t.dtype, t.shape, box, expected);
  return std::equal(expected.begin(), expected.end(), elements.begin());
}

void expect_pattern(TensorSource& source, Rng& rng) {
  std::vector<std::byte> scratch(static_cast<std::size_t>(16 + below(rng, 5000)));
  const auto& tensors = source.catalog().tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    for (int n = 0; n < 4; ++n) {
      const Box box = n == 0 ? whole(t.shape) : random_box(rng, t.shape);
      std::vector<std::byte> out(static_cast<std::size_t>(volume(box) * byte_size(t.dtype)));
      ASSERT_OK(source.read(i, box, out, scratch));
      ASSERT_TRUE(is_pattern(t, box, out)) << t.name << " " << to_string(t.shape) << " " << to_string(box);
    }
  }
  ASSERT_OK(source.finish(scratch, nullptr));
}

std::vector<TargetTensor> random_tensors(Rng& rng, const Mesh& mesh, bool for_safetensors) {
  std::vector<TargetTensor> out;
  for (Index i = 0, n = 1 + below(rng, 4); i < n; ++i) {
    TargetTensor t;
    t.name = "layers." + std::to_string(i) + ".w";
    do t.dtype = static_cast<DType>(below(rng, 21));
    while (for_safetensors && info(t.dtype).safetensors_name.empty());
    t.shape = random_shape(rng);
    t.placement = random_placement(rng, mesh, t.shape);
    out.push_back(std::move(t));
  }
  return out;
}

RunOptions ample(int threads) {
  RunOptions options;
  options.threads = threads;
  options.memory = Index{1} << 40;  // sanitizers take a lot
  return options;
}

class Pipeline : public testing::Test {
 protected:
  // Converts between A, B and Hugging Face's format, and back to A.
  void one_case(unsigned seed) {
    SCOPED_TRACE(seed);
    Rng rng(seed);
    const TempDir dir;
    const std::string a_path = dir / "a", b_path = dir / "b", hf_path = dir / "hf", back_path = dir / "back";
    const RunOptions options = ample(static_cast<int>(1 + below(rng, 3)));
    std::vector<TensorProof> proofs, again;

    LayoutRequest a;
    a.mesh = random_mesh(rng);
    const bool through_hf = below(rng, 2) == 0;
    a.tensors = random_tensors(rng, a.mesh, through_hf);
    if (!through_hf && below(rng, 2) == 0) a.blobs.push_back(none_blob("train_state"));
    PatternSource made_up(catalog_of(a.tensors));
    ASSERT_OK(write_checkpoint(made_up, kDcpFormat, a, a_path, options, &proofs));
    Opened from_a = must(open_all(kDcpFormat, a_path, dir.path()));
    ASSERT_NO_FATAL_FAILURE(expect_pattern(*from_a.source, rng));

    LayoutRequest b = a;
    b.mesh = random_mesh(rng);
    for (TargetTensor& t : b.tensors) t.placement = random_placement(rng, b.mesh, t.shape);
    FileSource a_again(from_a.reader->catalog(), from_a.reader->files());
    if (seed % 2 == 0) {
      ASSERT_OK(write_checkpoint(a_again, kDcpFormat, b, b_path, options, &again));
      ASSERT_EQ(proofs.size(), again.size());
      for (std::size_t i = 0; i < proofs.size(); ++i) {
        ASSERT_EQ(proofs[i].source, again[i].source) << a.tensors[i].name;
        ASSERT_EQ(proofs[i].target, again[i].target) << a.tensors[i].name;
      }
      Index shards = 0;  // shards with elements; each has a checksum
      for (const Tensor& t : a_again.catalog().tensors())
        for (std::size_t i = 0; i < t.fragments.size(); ++i) shards += !t.fragments.box(i).empty();
      EXPECT_EQ(a_again.checksums_checked(), shards);
    } else {
      ASSERT_OK(write_in_crumbs(a_again, kDcpFormat, b, b_path, rng));
    }
    Opened last = must(open_all(kDcpFormat, b_path, dir.path()));
    ASSERT_NO_FATAL_FAILURE(expect_pattern(*last.source, rng));

    if (through_hf) {
      LayoutRequest hf = b;
      hf.mesh = Mesh();
      for (TargetTensor& t : hf.tensors) t.placement = {};
      hf.max_file_bytes = 1 + below(rng, 100'000);
      ASSERT_OK(write_checkpoint(*last.source, kHfFormat, hf, hf_path, options, &again));
      for (std::size_t i = 0; i < proofs.size(); ++i) ASSERT_EQ(proofs[i].target, again[i].target);
      last = must(open_all(kHfFormat, hf_path, dir.path()));
      ASSERT_NO_FATAL_FAILURE(expect_pattern(*last.source, rng));
    }
    if (seed % 3 == 0)
      ASSERT_OK(write_in_crumbs(*last.source, kDcpFormat, a, back_path, rng));
    else
      ASSERT_OK(write_checkpoint(*last.source, kDcpFormat, a, back_path, options, &again));
    ASSERT_TRUE(contents(a_path) == contents(back_path)) << "the way there and back changed a file";
  }

  ScopedSyscalls sys_{without_sync()};
};

TEST_F(Pipeline, ThereAndBackIsTheIdentityOnAnyLayouts) {
  for (unsigned seed = 1; seed <= 160 && !HasFailure(); seed += static_cast<unsigned>(every_nth(4))) one_case(seed);
}

// Runs `job` with the least memory that it accepts: the smallest slabs, plus some for the process to grow.
template <class Job>
Status with_least_memory(int threads, Index extra, Job job) {
  constexpr Index kSmallest = Index{256} << 10;
  for (Index growth = Index{1} << 20;; growth *= 2) {
    RunOptions options = ample(threads);
    const MemoryPlan plan = TRY(plan_memory(options, 0, extra));
    options.memory =
        plan.peak + growth - threads * (plan.scratch_bytes + (1 + extra) * plan.slab_bytes - (2 + extra) * kSmallest);
    Status s = job(options);
    if (s || s.error().code() != ErrorCode::kUsage || growth > Index{1} << 30) return s;
  }
}

LayoutRequest megabytes() {
  LayoutRequest request;
  request.mesh = Mesh({{"dp_shard", 3}, {"tp", 4}});
  request.tensors = {
      {"rows", DType::kBFloat16, {1031, 1021}, {}, Placement{{{{"tp"}, 0}, {{"dp_shard"}, 0}}, -1}},
      {"columns", DType::kBFloat16, {1031, 1021}, {}, Placement{{{{"tp"}, 1}, {{"dp_shard"}, 0}}, -1}},
      {"deep", DType::kFloat32, {67, 31, 17, 19}, {}, Placement{{{{"tp"}, 2}, {{"dp_shard"}, 3}}, -1}},
      {"long", DType::kFloat64, {300'007}, {}, Placement{{{{"dp_shard", "tp"}, 0}}, -1}},
      {"wide", DType::kUint8, {3, 1'000'003}, {}, Placement{{{{"dp_shard"}, 1}}, -1}},
  };
  return request;
}

TEST_F(Pipeline, MemoryAndThreadsDoNotChangeABit) {
  const TempDir dir;
  const LayoutRequest request = megabytes();
  PatternSource made_up(catalog_of(request.tensors));
  std::vector<TensorProof> proofs, again;
  ASSERT_OK(write_checkpoint(made_up, kDcpFormat, request, dir / "ample", ample(2), &proofs));
  const auto expected = contents(dir / "ample");
  Opened first = must(open_all(kDcpFormat, dir / "ample", dir.path()));
  for (int threads = 1; threads <= 3; ++threads) {
    const std::string path = dir / std::to_string(threads);
    ASSERT_OK(with_least_memory(threads, 0, [&](const RunOptions& options) {
      FileSource source(first.reader->catalog(), first.reader->files());
      return write_checkpoint(source, kDcpFormat, request, path, options, &again);
    }));
    ASSERT_TRUE(contents(path) == expected) << threads;
    for (std::size_t i = 0; i < proofs.size(); ++i) ASSERT_EQ(proofs[i].target, again[i].target);
  }
}

TEST_F(Pipeline, SaysHowMuchMemoryItNeeds) {
  RunOptions options;
  options.threads = 2;
  options.memory = 1'000'000;
  const auto plan = plan_memory(options, 0, 0);
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().code(), ErrorCode::kUsage);
  EXPECT_TRUE(plan.error().message().starts_with("--memory 1.00 MB is too small: this job needs at least "))
      << plan.error().message();
}

TEST_F(Pipeline, ConvertsDtypesAndDigestsBoth) {
  const TempDir dir;
  LayoutRequest request = megabytes();
  request.tensors.resize(3);
  PatternSource made_up(catalog_of(request.tensors));
  std::vector<TensorProof> proofs;
  LayoutRequest wider = request;
  for (TargetTensor& t : wider.tensors) t.dtype = DType::kFloat32;
  ASSERT_OK(with_least_memory(2, 2, [&](const RunOptions& options) {
    return write_checkpoint(made_up, kDcpFormat, wider, dir / "wider", options, &proofs);
  }));
  EXPECT_NE(proofs[0].source, proofs[0].target);
  EXPECT_EQ(proofs[2].source, proofs[2].target);
  Opened opened = must(open_all(kDcpFormat, dir / "wider", dir.path()));
  // bfloat16 values survive a conversion to float32 and back.
  const auto narrowed =
      must(digest_tensors({{*opened.source->catalog().find("rows"), DType::kBFloat16}}, *opened.source, ample(2)));
  EXPECT_EQ(narrowed[0].source, proofs[0].target);
  EXPECT_EQ(narrowed[0].target, proofs[0].source);
}

TEST_F(Pipeline, NamesTensorAndFileOfAFlippedByte) {
  const TempDir dir;
  const LayoutRequest request = megabytes();
  PatternSource made_up(catalog_of(request.tensors));
  std::vector<TensorProof> proofs;
  ASSERT_OK(write_checkpoint(made_up, kDcpFormat, request, dir / "a", ample(2), &proofs));
  Opened a = must(open_all(kDcpFormat, dir / "a", dir.path()));
  const std::size_t columns = *a.source->catalog().find("columns");
  const Fragment hit = a.source->catalog().tensors()[columns].fragments.get(5);
  const std::string path = a.source->catalog().file_path(hit.extent.file);
  {
    const File file = must(File::open(path, File::Access::kReadWrite));
    std::byte b;
    ASSERT_OK(file.read_at(hit.extent.offset + 1000, {&b, 1}));
    b ^= std::byte{0x10};
    ASSERT_OK(file.write_at(hit.extent.offset + 1000, {&b, 1}));
  }
  const auto digests = digest_tensors({{columns, DType::kBFloat16}}, *a.source, ample(2));
  ASSERT_FALSE(digests.has_value());
  EXPECT_EQ(digests.error().code(), ErrorCode::kCorrupt);
  const std::string expected =
      at(path, hit.extent.offset) + ": tensor 'columns' " + to_string(hit.box) + ": expected CRC-32 ";
  EXPECT_TRUE(digests.error().message().starts_with(expected)) << digests.error().message();
  EXPECT_TRUE(digests.error().message().ends_with(": the bytes changed after they were saved"));

  // Read a part of the shard without the flipped byte: the rest is read at the end.
  FileSource again(a.reader->catalog(), a.reader->files());
  Box part = hit.box;
  part.origin[0] += part.shape[0] - 1;
  part.shape[0] = 1;
  std::vector<std::byte> out(static_cast<std::size_t>(volume(part) * 2)), scratch(1 << 16);
  ASSERT_OK(again.read(columns, part, out, scratch));
  const Status finish = again.finish(scratch, nullptr);
  ASSERT_FALSE(finish.has_value());
  EXPECT_EQ(finish.error().message(), digests.error().message());
}

std::mutex syncing;
std::condition_variable another;
int synced, at_once, failing;
bool was_shared;

// Waits until another call has begun.
int sync_with_others(int) {
  std::unique_lock lock(syncing);
  if (++synced == failing) return errno = EIO, -1;
  was_shared = was_shared || ++at_once > 1;
  another.notify_all();
  another.wait_for(lock, std::chrono::seconds(20), [] { return was_shared; });
  --at_once;
  return 0;
}

TEST_F(Pipeline, ForcesManyFilesToDiskAtOnceAndEachOfThem) {
  LayoutRequest request = megabytes();
  request.mesh = Mesh({{"dp_shard", 16}, {"tp", 4}});
  PatternSource made_up(catalog_of(request.tensors));
  std::vector<TensorProof> proofs;
  Syscalls calls = sys();
  calls.fdatasync = sync_with_others;
  const ScopedSyscalls counted(calls);
  for (const int nth : {0, 1, 40, 65}) {
    const TempDir dir;
    synced = at_once = 0;
    was_shared = nth > 0;  // do not wait if not all threads arrive
    failing = nth;
    const Status status = write_checkpoint(made_up, kDcpFormat, request, dir / "out", ample(2), &proofs);
    EXPECT_EQ(status.has_value(), nth == 0);
    EXPECT_EQ(*path_exists(dir / "out"), nth == 0);
    if (nth > 0) continue;
    EXPECT_TRUE(was_shared);
    EXPECT_EQ(synced, 65) << "files of 64 ranks, and the metadata";
  }
}

// Returns the catalog with its only matrix transposed.
Catalog transposed(const Catalog& catalog) {
  Catalog out;
  out.root = catalog.root;
  out.files = catalog.files;
  Tensor t = catalog.tensors()[0];
  const auto turn = [](Dims& dims) { std::swap(dims[0], dims[1]); };
  turn(t.shape);
  for (std::size_t i = 0; i < t.fragments.size(); ++i) {
    Fragment f = t.fragments.get(i);
    for (Dims* const dims : {&f.box.origin, &f.box.shape, &f.strides}) turn(*dims);
    t.fragments.set(i, f);
  }
  EXPECT_TRUE(out.add(std::move(t)));
  return out;
}

std::atomic<Index> bytes_read, writes;

TEST_F(Pipeline, ATransposedSideIsReadAndWrittenInRuns) {
  const TempDir dir;
  constexpr Index kRows = 5000, kColumns = 3000, kBytes = kRows * kColumns * 2;
  LayoutRequest request, turned;
  request.tensors = {{"m", DType::kBFloat16, {kRows, kColumns}, {}, {}}};
  turned.tensors = {{"m", DType::kBFloat16, {kColumns, kRows}, {}, {}}};
  PatternSource made_up(catalog_of(request.tensors));
  std::vector<TensorProof> proofs, back;
  ASSERT_OK(write_checkpoint(made_up, kHfFormat, request, dir / "a", ample(2), &proofs));
  Syscalls calls = sys();
  static const Syscalls real = calls;
  calls.pread = [](int fd, void* buffer, std::size_t n, off_t offset) {
    bytes_read += static_cast<Index>(n);
    return real.pread(fd, buffer, n, offset);
  };
  calls.pwrite = [](int fd, const void* buffer, std::size_t n, off_t offset) {
    ++writes;
    return real.pwrite(fd, buffer, n, offset);
  };
  const ScopedSyscalls counted(calls);
  const auto turn = [&](const std::string& from, const LayoutRequest& how, const std::string& to) -> Status {
    bytes_read = writes = 0;
    const Opened opened = TRY(open_all(kHfFormat, from, dir.path()));
    const Catalog view = transposed(opened.reader->catalog());
    FileSource source(view, opened.reader->files());
    return write_checkpoint(source, kHfFormat, how, to, ample(2), &back);
  };
  for (const auto& [from, how, to] : {std::tuple("a", &turned, "b"), std::tuple("b", &request, "c")}) {
    ASSERT_OK(turn(dir / from, *how, dir / to));
    EXPECT_LE(bytes_read, 4 * kBytes) << to;
    EXPECT_LE(writes, kBytes / 4096) << to;
  }
  EXPECT_EQ(back[0].target, proofs[0].target);
  EXPECT_NE(contents(dir / "a"), contents(dir / "b"));
  EXPECT_EQ(contents(dir / "a"), contents(dir / "c"));
}

TEST_F(Pipeline, EndsWhenInterrupted) {
  const TempDir dir;
  const LayoutRequest request = megabytes();
  PatternSource made_up(catalog_of(request.tensors));
  const std::atomic<bool> interrupt{true};
  RunOptions options = ample(2);
  options.interrupt = &interrupt;
  std::vector<TensorProof> proofs;
  const Status s = write_checkpoint(made_up, kDcpFormat, request, dir / "a", options, &proofs);
  ASSERT_FALSE(s.has_value());
  EXPECT_EQ(s.error().message(), "interrupted");
  EXPECT_FALSE(*path_exists(dir / "a"));
  EXPECT_FALSE(*path_exists(dir / "a.partial"));
}

TEST_F(Pipeline, ComparesTwoSourcesBoxByBox) {
  LayoutRequest request = megabytes();
  PatternSource a(catalog_of(request.tensors));
  for (TargetTensor& t : request.tensors) t.dtype = DType::kFloat64;
  PatternSource b(catalog_of(request.tensors));
  std::atomic<Index> elements{0};
  std::vector<PairRequest> pairs;
  for (std::size_t i = 0; i < request.tensors.size(); ++i) pairs.push_back({i, i});
  ASSERT_OK(visit_pairs(pairs, a, b, ample(2), [&](std::size_t i, const Box& box, Bytes in_a, Bytes in_b) {
    const Tensor &ta = a.catalog().tensors()[i], &tb = b.catalog().tensors()[i];
    elements += volume(box);
    EXPECT_TRUE(is_pattern(ta, box, in_a));
    EXPECT_TRUE(is_pattern(tb, box, in_b));
  }));
  Index expected = 0;
  for (const Tensor& t : a.catalog().tensors()) expected += t.elements();
  EXPECT_EQ(elements, expected);
}

TEST_F(Pipeline, ComparesPartsOfTwoSources) {
  const LayoutRequest request = megabytes();
  PatternSource a(catalog_of(request.tensors)), b(catalog_of(request.tensors));
  std::vector<PairRequest> pairs;
  for (std::size_t i = 0; i < request.tensors.size(); ++i) {
    Box box = whole(request.tensors[i].shape);
    for (int d = 0; d < box.rank(); ++d) {
      box.origin[d] = box.shape[d] / 3;
      box.shape[d] -= box.origin[d];
    }
    pairs.push_back({i, i, box});
  }
  std::vector<std::atomic<Index>> elements(pairs.size());
  ASSERT_OK(visit_pairs(pairs, a, b, ample(2), [&](std::size_t i, const Box& box, Bytes in_a, Bytes in_b) {
    const Tensor& t = a.catalog().tensors()[i];
    EXPECT_TRUE(contains(*pairs[i].box, box));
    EXPECT_TRUE(std::equal(in_a.begin(), in_a.end(), in_b.begin(), in_b.end()));
    EXPECT_TRUE(is_pattern(t, box, in_a));
    elements[i] += volume(box);
  }));
  for (std::size_t i = 0; i < pairs.size(); ++i) EXPECT_EQ(elements[i], volume(*pairs[i].box));
}

}  // namespace
}  // namespace reshard::pipeline_test
