// Checks this program's kernels, transfers and exchanges on a GPU against the CPU, and times them. tests/cuda/bench.sh
// builds and runs it; --help lists the options.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "lib/base/file.h"
#include "lib/base/memory_limit.h"
#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/device/copy.h"
#include "lib/device/cuda/cuda_device.h"
#include "lib/device/device.h"
#include "lib/transport/nccl.h"
#include "tests/support/device_checks.h"
#include "tests/support/exchange_checks.h"
#include "tests/support/local_ranks.h"
#include "tests/support/one_gpu_ranks.h"

namespace reshard {
namespace {

constexpr int kNoDevice = 77;  // test runners count this exit code as "skipped"

struct Options {
  std::string device = "cuda";
  std::string directory = "/tmp";
  Index bytes = Index{1} << 30;
  Index file_bytes = Index{4} << 30;
  std::vector<Index> chunks;  // bytes
  std::vector<Index> threads;
  int rounds = 7, times = 10;  // the median of `rounds` is reported, each with `times` runs
  double warm_up = 2;          // seconds
  bool checks = true;
  bool exchange = true;
  bool large = true;
  bool timings = true;
};

double seconds_of(const std::function<Status()>& work, Status& status) {
  const auto begin = std::chrono::steady_clock::now();
  status = work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Returns the median of some rounds, after one round to warm up.
Result<double> median_seconds(int n, const std::function<Status()>& work) {
  std::vector<double> rounds;
  for (int i = 0; i <= n; ++i) {
    Status status;
    const double s = seconds_of(work, status);
    TRY(std::move(status));
    if (i > 0) rounds.push_back(s);
  }
  std::sort(rounds.begin(), rounds.end());
  return rounds[rounds.size() / 2];
}

void fill_randomly(MutableBytes bytes, unsigned seed) {
  std::mt19937_64 random(seed);
  for (std::size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    // Clears the exponents' top bits, so the values are finite in every float type.
    const std::uint64_t v = random() & 0xbfbfbfbfbfbfbfbfu;
    std::memcpy(bytes.data() + i, &v, 8);
  }
}

// Returns whether something failed because this machine lacks a requirement.
bool is_absent(const Status& done) { return !done && done.error().code() == ErrorCode::kUnsupported; }

// ---- checks

Status check_all(Device& device, const Options& options) {
  struct Check {
    const char* name;
    Status (*run)(Device&, unsigned);
  };
  constexpr Check kChecks[] = {{"transfers", check_transfers},
                               {"copies", check_copies},
                               {"conversions", check_conversions},
                               {"digests", check_digests},
                               {"chains", check_chains}};
  for (const Check& check : kChecks)
    for (unsigned seed = 100; seed < 103; ++seed) {
      TRY(check.run(device, seed).context(check.name));
      if (seed == 102) std::printf("  %-12s equal to the CPU\n", check.name);
    }
  for (const int n : {2, 4, 8}) {
    if (!options.exchange) break;
    Status done = run_nccl_ranks_on_one_gpu(n, {}, [&](Transport& ranks) -> Status {
      if (!ranks.moves_device_memory()) return internal_error("messages over NCCL lie in host memory");
      return check_exchange(device, ranks, 11);
    });
    if (is_absent(done)) {
      std::printf("  %-12s not here: %s\n", "exchange", done.error().message().c_str());
      break;
    }
    TRY(std::move(done).context(std::to_string(n) + " ranks"));
    std::printf("  %-12s equal to the CPU: %d logical ranks over NCCL\n", "exchange", n);
  }
  if (!options.large) return {};
  // More than 4 GiB: columns of 24 KiB and their digest.
  constexpr Index kRows = 110000, kColumns = 24576;
  auto from = TRY(device.allocate(2 * kRows * kColumns)), to = TRY(device.allocate(2 * kRows * kColumns));
  auto stream = TRY(device.stream());
  fill_randomly(from->buffer().host, 5);
  TRY(stream->upload(from->buffer(), 2 * kRows * kColumns));
  const std::byte* source = from->buffer().device.data();
  std::byte* target = to->buffer().device.data();
  for (const Index half : {0, 1})
    TRY(stream->copy_box({kRows, kColumns / 2}, 2, source + half * kColumns, {kColumns, 1},
                         target + half * kRows * kColumns, {kColumns / 2, 1}));
  Digest digests[3];
  const Dims shape = {kRows, kColumns};
  TRY(stream->digest_box(shape, whole(shape), 2, source, &digests[0]));
  for (const Index half : {0, 1})
    TRY(stream->digest_box(shape, {{0, half * kColumns / 2}, {kRows, kColumns / 2}}, 2,
                           target + half * kRows * kColumns, &digests[1 + half]));
  TRY(stream->wait());
  digests[1] += digests[2];
  const Digest expected = digest_box(shape, whole(shape), 2, from->buffer().host.data());
  if (digests[0] != expected || digests[1] != expected)
    return internal_error("5.4 GB: expected " + expected.hex() + ", got " + digests[0].hex() + " and " +
                          digests[1].hex());
  std::printf("  %-12s equal to the CPU: 5.4 GB\n", "large");
  return {};
}

// ---- timings

// Rates, next to the limit that the same run measured.
class Table {
 public:
  Table(const std::string& what, const std::string& limit) {
    std::printf("\n| %-52s | %8s | %s |\n| --- | ---: | ---: |\n", what.c_str(), "GB/s", limit.c_str());
  }
  // With a `limit` of 0, all lines are compared with the first line's rate.
  void add(const std::string& what, double rate, double limit = 0) {
    if (first_ == 0) first_ = rate;
    std::printf("| %-52s | %8.2f | %5.1f %% |\n", what.c_str(), rate, 100 * rate / (limit > 0 ? limit : first_));
    std::fflush(stdout);
  }

 private:
  double first_ = 0;
};

// A matrix of 2-byte elements whose rows hold 8 runs of `run` bytes: packs the runs of each column shard, or the
// reverse.
Status column_shards(Stream& stream, Index bytes, Index run, bool pack, std::byte* from, std::byte* to) {
  const Index columns = run / 2, rows = bytes / (8 * run);
  for (Index shard = 0; shard < 8; ++shard) {
    std::byte* matrix = (pack ? from : to) + shard * run;
    std::byte* packed = (pack ? to : from) + shard * rows * run;
    TRY(pack ? stream.copy_box({rows, columns}, 2, matrix, {8 * columns, 1}, packed, {columns, 1})
             : stream.copy_box({rows, columns}, 2, packed, {columns, 1}, matrix, {8 * columns, 1}));
  }
  return {};
}

// The rotary permutation: reorders rows of heads of 128 from pairs to halves, in matrices of 8,192 2-byte columns.
Status rotary(Stream& stream, Index bytes, std::byte* from, std::byte* to) {
  constexpr Index kColumns = 8192, kHead = 128;
  const Index heads = bytes / (2 * kColumns * kHead);
  return stream.copy_box({heads, 2, kHead / 2, kColumns}, 2, from, {kHead * kColumns, kColumns, 2 * kColumns, 1}, to,
                         {kHead * kColumns, kHead / 2 * kColumns, kColumns, 1});
}

// Returns the size of the largest square matrices that fit, at most 8,192 rows.
Index matrix_side(Index bytes, Index element) {
  Index side = 8192;
  while (side * side * element > bytes) side /= 2;
  return side;
}

// Returns the rate of copying within the device, GB/s read and written.
Result<double> time_kernels(Device& device, const Options& options) {
  const Index bytes = options.bytes;
  auto a = TRY(device.allocate(bytes)), b = TRY(device.allocate(bytes));
  auto stream = TRY(device.stream());
  fill_randomly(a->buffer().host, 1);
  fill_randomly(b->buffer().host, 2);
  TRY(stream->upload(a->buffer(), bytes));
  TRY(stream->upload(b->buffer(), bytes));
  TRY(stream->wait());
  std::byte *from = a->buffer().device.data(), *to = b->buffer().device.data();
  const auto copy = [&] { return stream->copy_box({bytes}, 1, from, {1}, to, {1}); };

  // Repeats the work, so that the cost of launching it is negligible, and waits.
  const auto repeated = [&](Index times, const std::function<Status()>& work) -> Status {
    for (Index i = 0; i < times; ++i) TRY(work());
    return stream->wait();
  };
  // A GPU takes a while to raise its clocks, and all lines are compared with the first.
  Status warm;
  for (double warmed = 0; warm && warmed < options.warm_up;)
    warmed += seconds_of([&] { return repeated(options.times, copy); }, warm);
  TRY(std::move(warm));

  std::printf("\n%s each, medians of %d; GB/s read and written\n", human_bytes(bytes).c_str(), options.rounds);
  Table table("kernel", "of copy");
  const auto add = [&](const std::string& what, Index moved, const std::function<Status()>& work) -> Result<double> {
    const double seconds = TRY(median_seconds(options.rounds, [&] { return repeated(options.times, work); }));
    const double rate = static_cast<double>(options.times * moved) / seconds / 1e9;
    table.add(what, rate);
    return rate;
  };
  const double of_copy = TRY(add("device-to-device copy", 2 * bytes, copy));
  for (const bool pack : {true, false})
    for (const Index run : {128, 512, 2048, 4096, 13312, 26624})
      TRY(add(std::string(pack ? "pack" : "unpack") + " column shards, tp=8, runs of " + with_commas(run) + " B",
              2 * (bytes / (8 * run)) * 8 * run, [&] { return column_shards(*stream, bytes, run, pack, from, to); }));
  if (bytes >= Index{2} << 20)
    TRY(add("rotary permutation, heads of 128, rows of 16,384 B", 2 * bytes,
            [&] { return rotary(*stream, bytes, from, to); }));
  for (const Index element : {1, 2, 4}) {
    const Index side = matrix_side(bytes, element), matrices = bytes / (side * side * element);
    TRY(add("transpose of " + with_commas(side) + " x " + with_commas(side) + ", " + std::to_string(element) + " B",
            2 * matrices * side * side * element, [&] {
              return stream->copy_box({matrices, side, side}, element, from, {side * side, side, 1}, to,
                                      {side * side, 1, side});
            }));
  }
  struct Cast {
    DType from, to;
  };
  for (const Cast& cast : {Cast{DType::kBFloat16, DType::kFloat32}, Cast{DType::kFloat32, DType::kBFloat16},
                           Cast{DType::kFloat16, DType::kBFloat16}, Cast{DType::kFloat32, DType::kFloat16},
                           Cast{DType::kBFloat16, DType::kFloat8E4M3}, Cast{DType::kFloat8E4M3, DType::kBFloat16},
                           Cast{DType::kFloat32, DType::kFloat8E5M2}, Cast{DType::kFloat64, DType::kFloat32}}) {
    const Index in = byte_size(cast.from), out = byte_size(cast.to), n = bytes / std::max(in, out);
    TRY(add("cast " + std::string(info(cast.from).torch_name) + " -> " + std::string(info(cast.to).torch_name),
            n * (in + out), [&] { return stream->convert(cast.from, cast.to, from, to, n); }));
  }
  Digest digest;
  for (const Index element : {2, 1})
    TRY(add("digest, " + std::to_string(element) + " B elements", bytes,
            [&] { return stream->digest_box({bytes / element}, whole({bytes / element}), element, from, &digest); }));
  for (const Index run : {64, 512, 4096}) {
    const Index rows = bytes / run;
    TRY(add("digest of a column shard, runs of " + with_commas(run) + " B", rows * run, [&] {
      return stream->digest_box({rows, 4 * run}, {{0, run}, {rows, run / 2}}, 2, from, &digest);
    }));
  }
  // The work that the engine queues: one slab at a time.
  for (const Index slab : {Index{1} << 20, Index{8} << 20, Index{16} << 20})
    if (slab <= bytes)
      TRY(add("pack column shards of " + human_bytes(slab) + ", runs of 2,048 B", 2 * slab,
              [&] { return column_shards(*stream, slab, 2048, true, from, to); }));
  return of_copy;
}

struct Rates {
  double up = 0, down = 0, both = 0;  // GB/s; both: each direction while both are busy
};

Result<Rates> time_transfers(Device& device, const Options& options) {
  const Index bytes = std::min(options.bytes, Index{1} << 30);
  auto a = TRY(device.allocate(bytes)), b = TRY(device.allocate(bytes));
  auto one = TRY(device.stream()), other = TRY(device.stream());
  // In pieces of at most `chunk` bytes.
  const auto rate = [&](Index chunk, bool up, bool down) -> Result<double> {
    const double seconds = TRY(median_seconds(options.rounds, [&]() -> Status {
      for (Index at = 0; at < bytes; at += chunk) {
        const Index n = std::min(chunk, bytes - at);
        if (up) TRY(one->upload(a->buffer().part(at, n), n));
        if (down) TRY(other->download(b->buffer().part(at, n), n));
      }
      TRY(one->wait());
      return other->wait();
    }));
    return static_cast<double>(bytes) / seconds / 1e9;
  };
  Rates rates;
  rates.up = TRY(rate(bytes, true, false));
  rates.down = TRY(rate(bytes, false, true));
  rates.both = TRY(rate(bytes, true, true));
  Table table("transfer", "of pinned memory -> device");
  table.add("pinned memory -> device", rates.up);
  table.add("device -> pinned memory", rates.down);
  table.add("both at once, each way", rates.both);
  for (const Index chunk : options.chunks)
    if (chunk < bytes)
      table.add("pinned memory -> device, " + human_bytes(chunk) + " each", TRY(rate(chunk, true, false)));
  return rates;
}

// One thread's buffer and stream.
struct Worker {
  std::unique_ptr<Device::Memory> memory;
  std::unique_ptr<Stream> stream;
  Digest digest;
};

// The path of a file's bytes to the memory where they are processed.
enum class Way { kHost, kDevice, kCuFile };

// Reads a file, chunk by chunk on several threads: into host memory only, through host memory into the device, or
// directly into the device. In the device, also digests the chunks.
Status read_file(const std::shared_ptr<const File>& file, Index size, Way way, Index chunk,
                 std::vector<Worker>& workers) {
  return parallel_for(ceil_div(size, chunk), static_cast<int>(workers.size()), [&](int thread, Index i) -> Status {
    Worker& worker = workers[static_cast<std::size_t>(thread)];
    const DeviceBuffer buffer = worker.memory->buffer();
    const auto bytes = static_cast<std::size_t>(std::min(chunk, size - i * chunk));
    if (way == Way::kCuFile) {
      if (!TRY(worker.stream->read_file(file, i * chunk, buffer.device.first(bytes))))
        return unsupported("cuFile does not read it");
    } else {
      TRY(file->read_at(i * chunk, buffer.host.first(bytes)));
    }
    if (way == Way::kHost) return {};
    if (way == Way::kDevice) TRY(worker.stream->upload(buffer, static_cast<Index>(bytes)));
    Digest digest;
    TRY(worker.stream->digest_box({size}, {{i * chunk}, {static_cast<Index>(bytes)}}, 1, buffer.device.data(),
                                  &digest));
    TRY(worker.stream->wait());
    worker.digest += digest;
    return {};
  });
}

Result<std::vector<Worker>> make_workers(Device& device, Index threads, Index chunk) {
  std::vector<Worker> out(static_cast<std::size_t>(threads));
  for (Worker& worker : out) {
    worker.memory = TRY(device.allocate(chunk));
    worker.stream = TRY(device.stream());
  }
  return out;
}

// A file and the digest of its bytes.
struct Source {
  std::shared_ptr<const File> file;
  Index size = 0;
  Digest digest;
};

Result<Source> make_source(const Options& options) {
  Source out{std::make_shared<const File>(TRY(File::create_anonymous(options.directory))), options.file_bytes, {}};
  std::vector<std::byte> part(static_cast<std::size_t>(std::min(Index{16} << 20, out.size)));
  for (Index at = 0; at < out.size; at += static_cast<Index>(part.size())) {
    const auto n = static_cast<std::size_t>(std::min<Index>(std::ssize(part), out.size - at));
    fill_randomly(part, static_cast<unsigned>(at >> 20));
    TRY(out.file->write_at(at, Bytes(part).first(n)));
    out.digest += digest_run(Bytes(part).first(n), at, 1);
  }
  return out;
}

// The highest rate of reading the file into host memory, GB/s.
struct FileRates {
  double cached = 0, direct = 0;
};

// Times reading by chunk size and number of threads, to choose the slabs of a load.
Status time_reading(Device& device, const Options& options, const Source& source, const Rates& rates, FileRates& best) {
  const auto rate = [&](const std::shared_ptr<const File>& file, Way way, Index chunk,
                        Index threads) -> Result<double> {
    auto workers = TRY(make_workers(device, threads, chunk));
    const double seconds = TRY(median_seconds(std::min(options.rounds, 3), [&]() -> Status {
      for (Worker& worker : workers) worker.digest = {};
      TRY(read_file(file, source.size, way, chunk, workers));
      Digest sum;
      for (const Worker& worker : workers) sum += worker.digest;
      if (way != Way::kHost && sum != source.digest)
        return internal_error("digest: expected " + source.digest.hex() + ", got " + sum.hex());
      return {};
    }));
    return static_cast<double>(source.size) / seconds / 1e9;
  };
  const Result<File> reopened = source.file->reopen_direct();
  const auto direct = reopened ? std::make_shared<const File>(TRY(source.file->reopen_direct())) : nullptr;
  struct Row {
    const char* name;
    std::shared_ptr<const File> file;
    Way way;
  };
  for (const Row& row :
       {Row{"page cache -> host", source.file, Way::kHost},
        Row{"page cache -> host -> device -> digest", source.file, Way::kDevice},
        Row{"O_DIRECT -> host", direct, Way::kHost}, Row{"O_DIRECT -> host -> device -> digest", direct, Way::kDevice},
        Row{"cuFile -> device -> digest", source.file, Way::kCuFile}}) {
    if (!row.file) {
      std::printf("\n%s: not here: this file system reads through its cache\n", row.name);
      continue;
    }
    double& host = row.file == direct ? best.direct : best.cached;
    Table table(row.name, row.way == Way::kHost ? "of the first" : "of the slower of host and transfer");
    for (const Index chunk : options.chunks)
      for (const Index threads : options.threads) {
        const auto got = rate(row.file, row.way, chunk, threads);
        if (!got && got.error().code() == ErrorCode::kUnsupported) {
          std::printf("not here: %s\n", got.error().message().c_str());
          break;
        }
        const double gb = TRY(got);
        if (row.way == Way::kHost) host = std::max(host, gb);
        table.add(human_bytes(chunk) + " x " + count_of(threads, "thread"), gb,
                  row.way == Way::kDevice   ? std::min(host, rates.up)
                  : row.way == Way::kCuFile ? rates.up
                                            : 0);
      }
  }
  return {};
}

// Copies a file, chunk by chunk on several threads: through the device with a digest, or through host memory only. Each
// thread writes a file of its own, because an inode admits one writer at a time.
Status copy_file(const Source& from, const std::vector<File>& to, bool through_device, Index chunk,
                 std::vector<Worker>& workers) {
  return parallel_for(ceil_div(from.size, chunk), static_cast<int>(workers.size()), [&](int thread, Index i) -> Status {
    Worker& worker = workers[static_cast<std::size_t>(thread)];
    const DeviceBuffer buffer = worker.memory->buffer();
    const Index bytes = std::min(chunk, from.size - i * chunk);
    const MutableBytes part = buffer.host.first(static_cast<std::size_t>(bytes));
    TRY(from.file->read_at(i * chunk, part));
    if (through_device) {
      Digest digest;
      TRY(worker.stream->upload(buffer, bytes));
      TRY(worker.stream->digest_box({from.size}, {{i * chunk}, {bytes}}, 1, buffer.device.data(), &digest));
      TRY(worker.stream->download(buffer, bytes));
      TRY(worker.stream->wait());
      worker.digest += digest;
    }
    return to[static_cast<std::size_t>(thread)].write_at(i * chunk, part);
  });
}

Status time_pipeline(Device& device, const Options& options, const Source& source, const Rates& rates) {
  const Index threads = std::min<Index>(8, options.threads.back());
  const Index chunk = std::min(Index{16} << 20, options.chunks.back());
  auto workers = TRY(make_workers(device, threads, chunk));
  std::vector<File> to;
  for (Index i = 0; i < threads; ++i) to.push_back(TRY(File::create_anonymous(options.directory)));
  const int rounds = std::min(options.rounds, 3);
  const double gb = static_cast<double>(source.size) / 1e9;
  const double plain = gb / TRY(median_seconds(rounds, [&] { return copy_file(source, to, false, chunk, workers); }));
  const double seconds = TRY(median_seconds(rounds, [&]() -> Status {
    for (Worker& worker : workers) worker.digest = {};
    TRY(copy_file(source, to, true, chunk, workers));
    Digest sum;
    for (const Worker& worker : workers) sum += worker.digest;
    if (sum != source.digest) return internal_error("digest: expected " + source.digest.hex() + ", got " + sum.hex());
    return {};
  }));
  Table table("file -> file, " + count_of(threads, "thread") + ", a file each", "of the slower of host and transfers");
  table.add("through host memory", plain);
  table.add("through the device, with digests", gb / seconds, std::min(plain, rates.both));
  return {};
}

// Runs NCCL between logical ranks of one GPU, which shows that it works but not how fast links are. `of_copy`: the rate
// of copying within the GPU, bytes read and written.
Status time_exchange(Device& device, const Options& options, double of_copy) {
  Table table("logical ranks on one GPU, over NCCL", "of copying there");
  for (const int n : {2, 4, 8}) {
    const Index message = std::min(options.bytes, Index{1} << 30) / (n * (n - 1));
    double seconds = 0;
    TRY(run_nccl_ranks_on_one_gpu(n, {}, [&](Transport& ranks) -> Status {
      auto sent = TRY(device.allocate(message * (n - 1), Sides::kDevice));
      auto got = TRY(device.allocate(message * (n - 1), Sides::kDevice));
      const auto part = [&](const std::unique_ptr<Device::Memory>& memory, std::size_t i) {
        return memory->buffer().device.subspan(i * static_cast<std::size_t>(message),
                                               static_cast<std::size_t>(message));
      };
      const double mine = TRY(median_seconds(options.rounds, [&]() -> Status {
        std::vector<Outgoing> out;
        std::vector<Incoming> in;
        for (int peer = 0; peer < n; ++peer) {
          if (peer == ranks.rank()) continue;
          out.push_back({peer, part(sent, out.size())});
          in.push_back({peer, part(got, in.size())});
        }
        return TRY(ranks.start(std::move(out), std::move(in)))->wait();
      }));
      if (ranks.rank() == 0) seconds = mine;
      return {};
    }));
    table.add(std::to_string(n) + " ranks", static_cast<double>(message * n * (n - 1)) / seconds / 1e9, of_copy / 2);
  }
  return {};
}

// Times a ring of GPUs that all send to the next one at once, a thread and a rank each. Returns the rate of each, in
// GB/s.
Result<double> time_ring(const std::vector<int>& gpus, const Options& options) {
  const int n = static_cast<int>(gpus.size());
  const NcclId id = TRY(make_nccl_id());
  std::vector<double> rates(gpus.size());
  TRY(run_local_ranks(n, [&](Transport& control) -> Status {
    const int rank = control.rank(), gpu = gpus[static_cast<std::size_t>(rank)];
    const auto device = TRY(open_device("cuda:" + std::to_string(gpu), 0));
    const auto nccl = TRY(open_nccl(id, rank, n, {.device = gpu}, &control));
    const auto sent = TRY(device->allocate(options.bytes, Sides::kDevice));
    const auto got = TRY(device->allocate(options.bytes, Sides::kDevice));
    const double seconds = TRY(median_seconds(options.rounds, [&]() -> Status {
      return TRY(nccl->start({{(rank + 1) % n, sent->buffer().device}}, {{(rank + n - 1) % n, got->buffer().device}}))
          ->wait();
    }));
    rates[static_cast<std::size_t>(rank)] = static_cast<double>(options.bytes) / seconds / 1e9;
    return nccl->part();
  }));
  return *std::min_element(rates.begin(), rates.end());
}

// Times each link in both directions at once, then all links together: through a switch they do not slow each other.
Status time_links(const Options& options) {
  const int count = TRY(count_cuda_devices());
  if (count < 2) return {};
  Table table("links between GPUs, over NCCL; each way", "of the fastest link");
  struct Link {
    std::string name;
    double rate = 0;
  };
  std::vector<Link> links;
  double fastest = 0;
  std::vector<int> all;
  for (int gpu = 0; gpu < count; ++gpu) {
    for (const int other : all) {
      const double rate = TRY(time_ring({other, gpu}, options));
      links.push_back({"cuda:" + std::to_string(other) + " and cuda:" + std::to_string(gpu), rate});
      fastest = std::max(fastest, rate);
    }
    all.push_back(gpu);
  }
  for (const Link& link : links) table.add(link.name, link.rate, fastest);
  if (count > 2) table.add("all " + std::to_string(count) + " in a ring", TRY(time_ring(all, options)), fastest);
  return {};
}

// ---- the program

int usage(int code) {
  std::printf(
      "bench [--device cuda:N] [--bytes 1GiB] [--dir /tmp] [--file 4GiB] [--chunks 1MiB,...] [--threads 4,...]\n"
      "      [--rounds 7] [--times 10] [--warm-up 2] [--no-checks] [--no-exchange] [--no-large] [--checks-only]\n");
  return code;
}

Result<std::vector<Index>> parse_list(const std::string& text) {
  std::vector<Index> out;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    out.push_back(TRY(parse_bytes(text.substr(at, end - at))));
    if (out.back() < 1) return usage_error("expected numbers above 0, got '" + text + "'");
    at = end + 1;
  }
  std::sort(out.begin(), out.end());
  return out;
}

Result<Options> parse_options(int argc, char** argv) {
  Options options;
  options.chunks = TRY(parse_list("1MiB,2MiB,4MiB,8MiB,16MiB,32MiB,64MiB"));
  options.threads = TRY(parse_list("4,8,16,32"));
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&]() -> Result<std::string> {
      if (i + 1 >= argc) return usage_error(name + ": expected a value");
      return std::string(argv[++i]);
    };
    if (name == "--device") {
      options.device = TRY(value());
    } else if (name == "--bytes") {
      options.bytes = TRY(parse_bytes(TRY(value())));
    } else if (name == "--dir") {
      options.directory = TRY(value());
    } else if (name == "--file") {
      options.file_bytes = TRY(parse_bytes(TRY(value())));
    } else if (name == "--chunks") {
      options.chunks = TRY(parse_list(TRY(value())));
    } else if (name == "--threads") {
      options.threads = TRY(parse_list(TRY(value())));
    } else if (name == "--rounds") {
      options.rounds = std::max(1, std::atoi(TRY(value()).c_str()));
    } else if (name == "--times") {
      options.times = std::max(1, std::atoi(TRY(value()).c_str()));
    } else if (name == "--warm-up") {
      options.warm_up = std::atof(TRY(value()).c_str());
    } else if (name == "--no-checks") {
      options.checks = false;
    } else if (name == "--no-exchange") {
      options.exchange = false;
    } else if (name == "--no-large") {
      options.large = false;
    } else if (name == "--checks-only") {
      options.timings = false;
    } else {
      return usage_error(name + ": not an option");
    }
  }
  if (options.bytes < (Index{1} << 20)) return usage_error("--bytes: expected 1MiB or more");
  return options;
}

// Measures as much as possible even if a part fails, because machines are expensive. Returns the first failure that is
// not a missing requirement.
Status run(Device& device, const Options& options) {
  Status first;
  const auto note = [&](Status done) {
    if (done) return true;
    const bool absent = is_absent(done);
    std::printf("%s: %s\n", absent ? "not here" : "FAILED", done.error().message().c_str());
    if (first && !absent) first = std::move(done);
    return false;
  };
  if (options.checks) {
    std::printf("checks\n");
    note(check_all(device, options));
  }
  std::printf("host memory: %s, of which drivers took %s\n", human_bytes(resident_bytes()).c_str(),
              human_bytes(resident_bytes() - held_bytes()).c_str());
  if (!options.timings) return first;
  const auto of_copy = time_kernels(device, options);
  note(of_copy ? Status() : Status(of_copy.error()));
  const auto rates = time_transfers(device, options);
  const auto source = make_source(options);
  FileRates files;
  if (rates && source) {
    note(time_reading(device, options, *source, *rates, files));
    note(time_pipeline(device, options, *source, *rates));
  } else {
    note(rates ? Status(source.error()) : Status(rates.error()));
  }
  if (options.exchange) note(time_exchange(device, options, of_copy ? *of_copy : 0));
  if (options.exchange) note(time_links(options));
  // bench.sh compares loads with these limits.
  std::printf("\nlimits of a load: page cache %.2f GB/s, drives %.2f GB/s\n",
              rates ? std::min(files.cached, rates->up) : 0, rates ? std::min(files.direct, rates->up) : 0);
  return first;
}

int main_of(int argc, char** argv) {
  if (argc > 1 && (std::string(argv[1]) == "--help" || std::string(argv[1]) == "-h")) return usage(0);
  const auto options = parse_options(argc, argv);
  if (!options) {
    std::fprintf(stderr, "%s\n", options.error().message().c_str());
    return usage(2);
  }
  if (const auto count = count_cuda_devices(); !count) {
    std::fprintf(stderr, "no CUDA device: %s\n", count.error().message().c_str());
    return kNoDevice;
  }
  const auto device = open_device(options->device, 0);
  if (!device) {
    std::fprintf(stderr, "%s\n", device.error().message().c_str());
    return 1;
  }
  std::printf("%s\n", std::string((*device)->name()).c_str());
  const Status status = run(**device, *options);
  if (!status) std::fprintf(stderr, "FAILED: %s\n", status.error().message().c_str());
  return status ? 0 : 1;
}

}  // namespace
}  // namespace reshard

int main(int argc, char** argv) { return reshard::main_of(argc, argv); }
