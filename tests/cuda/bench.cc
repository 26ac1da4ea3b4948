// What a GPU does with the kernels, transfers and exchanges of this program, checked against the CPU and timed.
// tests/cuda/bench.sh builds and runs it; --help lists the options.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "lib/base/file.h"
#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/device/copy.h"
#include "lib/device/cuda/cuda_device.h"
#include "lib/device/device.h"
#include "lib/transport/nccl.h"
#include "tests/support/device_checks.h"
#include "tests/support/exchange_checks.h"

namespace reshard {
namespace {

constexpr int kNoDevice = 77;  // what test runners take for "skipped"

struct Options {
  std::string device = "cuda";
  std::string directory = "/tmp";
  Index bytes = Index{1} << 30;
  Index file_bytes = Index{4} << 30;
  int threads = 8;
  bool checks = true;
  bool large = true;
  bool timings = true;
};

double seconds_of(const std::function<Status()>& work, Status& status) {
  const auto begin = std::chrono::steady_clock::now();
  status = work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The median of seven rounds after one that does not count.
Result<double> median_seconds(const std::function<Status()>& work) {
  std::vector<double> rounds;
  for (int i = 0; i < 8; ++i) {
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
    // Finite in every float type: the exponents' top bits are kept apart.
    const std::uint64_t v = random() & 0xbfbfbfbfbfbfbfbfu;
    std::memcpy(bytes.data() + i, &v, 8);
  }
}

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
    TRY(run_nccl_ranks_on_one_gpu(n, {}, [&](Transport& ranks) {
          return check_exchange(device, ranks, 11);
        }).context(std::to_string(n) + " ranks"));
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

class Table {
 public:
  // `moved`: bytes read and written in one run.
  Status add(const std::string& what, Index moved, const std::function<Status()>& work) {
    const double seconds = TRY(median_seconds(work));
    const double rate = static_cast<double>(moved) / seconds / 1e9;
    if (copy_ == 0) copy_ = rate;
    std::printf("| %-52s | %8.1f | %5.1f %% |\n", what.c_str(), rate, 100 * rate / copy_);
    std::fflush(stdout);
    return {};
  }

 private:
  double copy_ = 0;  // of the first line, which all others are compared with
};

// Repeats work so that starting it weighs little, and waits.
constexpr Index kTimes = 10;
Status repeated(Stream& stream, const std::function<Status()>& work) {
  for (Index i = 0; i < kTimes; ++i) TRY(work());
  return stream.wait();
}

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

// Rows of heads of 128, in pairs to in halves, of matrices with 8,192 columns of 2 bytes.
Status rotary(Stream& stream, Index bytes, std::byte* from, std::byte* to) {
  constexpr Index kColumns = 8192, kHead = 128;
  const Index heads = bytes / (2 * kColumns * kHead);
  return stream.copy_box({heads, 2, kHead / 2, kColumns}, 2, from, {kHead * kColumns, kColumns, 2 * kColumns, 1}, to,
                         {kHead * kColumns, kHead / 2 * kColumns, kColumns, 1});
}

Status time_kernels(Device& device, const Options& options) {
  const Index bytes = options.bytes;
  auto a = TRY(device.allocate(bytes)), b = TRY(device.allocate(bytes));
  auto stream = TRY(device.stream());
  fill_randomly(a->buffer().host, 1);
  fill_randomly(b->buffer().host, 2);
  TRY(stream->upload(a->buffer(), bytes));
  TRY(stream->upload(b->buffer(), bytes));
  TRY(stream->wait());
  std::byte *from = a->buffer().device.data(), *to = b->buffer().device.data();

  std::printf("\n%s each, median of 7; GB/s read and written\n\n", human_bytes(bytes).c_str());
  std::printf("| %-52s | %8s | %7s |\n| --- | ---: | ---: |\n", "kernel", "GB/s", "/ copy");
  Table table;
  const auto add = [&](const std::string& what, Index moved, const std::function<Status()>& work) {
    return table.add(what, kTimes * moved, [&] { return repeated(*stream, work); });
  };
  TRY(add("device-to-device copy", 2 * bytes, [&] { return stream->copy_box({bytes}, 1, from, {1}, to, {1}); }));
  for (const bool pack : {true, false})
    for (const Index run : {128, 512, 2048, 4096, 13312, 26624})
      TRY(add(std::string(pack ? "pack" : "unpack") + " column shards, tp=8, runs of " + with_commas(run) + " B",
              2 * (bytes / (8 * run)) * 8 * run, [&] { return column_shards(*stream, bytes, run, pack, from, to); }));
  TRY(add("rotary permutation, heads of 128, rows of 16,384 B", 2 * bytes,
          [&] { return rotary(*stream, bytes, from, to); }));
  for (const Index element : {2, 4}) {
    constexpr Index kSide = 8192;
    const Index matrices = bytes / (kSide * kSide * element);
    TRY(add("transpose of 8,192 x 8,192, " + std::to_string(element) + " B", 2 * matrices * kSide * kSide * element,
            [&] {
              return stream->copy_box({matrices, kSide, kSide}, element, from, {kSide * kSide, kSide, 1}, to,
                                      {kSide * kSide, 1, kSide});
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
  return {};
}

struct Rates {
  double up = 0, down = 0, both = 0;  // GB/s; both: of each direction, when both are under way
};

Result<Rates> time_transfers(Device& device, const Options& options) {
  const Index bytes = std::min(options.bytes, Index{1} << 30);
  auto a = TRY(device.allocate(bytes)), b = TRY(device.allocate(bytes));
  auto one = TRY(device.stream()), other = TRY(device.stream());
  const auto rate = [&](const std::function<Status()>& work) -> Result<double> {
    return static_cast<double>(bytes) / TRY(median_seconds(work)) / 1e9;
  };
  Rates rates;
  rates.up = TRY(rate([&]() -> Status {
    TRY(one->upload(a->buffer(), bytes));
    return one->wait();
  }));
  rates.down = TRY(rate([&]() -> Status {
    TRY(one->download(a->buffer(), bytes));
    return one->wait();
  }));
  rates.both = TRY(rate([&]() -> Status {
    TRY(one->upload(a->buffer(), bytes));
    TRY(other->download(b->buffer(), bytes));
    TRY(one->wait());
    return other->wait();
  }));
  std::printf("\npinned host memory -> device %.1f GB/s, device -> host %.1f GB/s, both at once %.1f GB/s each way\n",
              rates.up, rates.down, rates.both);
  return rates;
}

// One thread's buffer and stream.
struct Worker {
  std::unique_ptr<Device::Memory> memory;
  std::unique_ptr<Stream> stream;
  Digest digest;
};

// Reads a file into device memory, chunk by chunk on several threads: through host memory, or by the device itself.
Status read_file(const std::shared_ptr<const File>& file, Index size, bool by_device, std::vector<Worker>& workers) {
  const Index chunk = static_cast<Index>(workers[0].memory->buffer().host.size());
  return parallel_for(ceil_div(size, chunk), static_cast<int>(workers.size()), [&](int thread, Index i) -> Status {
    Worker& worker = workers[static_cast<std::size_t>(thread)];
    const DeviceBuffer buffer = worker.memory->buffer();
    const auto bytes = static_cast<std::size_t>(std::min(chunk, size - i * chunk));
    if (!by_device) {
      TRY(file->read_at(i * chunk, buffer.host.first(bytes)));
      TRY(worker.stream->upload(buffer, static_cast<Index>(bytes)));
    } else if (!TRY(worker.stream->read_file(file, i * chunk, buffer.device.first(bytes)))) {
      return unsupported("cuFile does not read it");
    }
    Digest digest;
    TRY(worker.stream->digest_box({size}, {{i * chunk}, {static_cast<Index>(bytes)}}, 1, buffer.device.data(),
                                  &digest));
    TRY(worker.stream->wait());
    worker.digest += digest;
    return {};
  });
}

// Copies a file, chunk by chunk on several threads, through the device and a digest, or through host memory only.
Status copy_file(const File& from, const File& to, Index size, bool through_device, std::vector<Worker>& workers) {
  const Index chunk = static_cast<Index>(workers[0].memory->buffer().host.size());
  return parallel_for(ceil_div(size, chunk), static_cast<int>(workers.size()), [&](int thread, Index i) -> Status {
    Worker& worker = workers[static_cast<std::size_t>(thread)];
    const DeviceBuffer buffer = worker.memory->buffer();
    const Index bytes = std::min(chunk, size - i * chunk);
    const MutableBytes part = buffer.host.first(static_cast<std::size_t>(bytes));
    TRY(from.read_at(i * chunk, part));
    if (through_device) {
      Digest digest;
      TRY(worker.stream->upload(buffer, bytes));
      TRY(worker.stream->digest_box({size}, {{i * chunk}, {bytes}}, 1, buffer.device.data(), &digest));
      TRY(worker.stream->download(buffer, bytes));
      TRY(worker.stream->wait());
      worker.digest += digest;
    }
    return to.write_at(i * chunk, part);
  });
}

Digest sum_of(const std::vector<Worker>& workers) {
  Digest sum;
  for (const Worker& worker : workers) sum += worker.digest;
  return sum;
}

// A file to the device, from the page cache through host memory, and past both by cuFile where it can.
Status time_reading(const std::shared_ptr<const File>& file, Index size, const Digest& expected,
                    std::vector<Worker>& workers) {
  for (const bool by_device : {false, true}) {
    const char* what = by_device ? "file -> device -> digest, by cuFile" : "file -> host -> device -> digest";
    const auto seconds = median_seconds([&]() -> Status {
      for (Worker& worker : workers) worker.digest = {};
      TRY(read_file(file, size, by_device, workers));
      const Digest sum = sum_of(workers);
      if (sum != expected) return internal_error("digest: expected " + expected.hex() + ", got " + sum.hex());
      return {};
    });
    if (!seconds && seconds.error().code() != ErrorCode::kUnsupported) return seconds.error();
    if (seconds) std::printf("%s: %.2f GB/s\n", what, static_cast<double>(size) / *seconds / 1e9);
    if (!seconds) std::printf("%s: not here\n", what);
  }
  return {};
}

Status time_pipeline(Device& device, const Options& options, const Rates& rates) {
  constexpr Index kChunk = Index{16} << 20;
  const auto source = std::make_shared<const File>(TRY(File::create_anonymous(options.directory)));
  const File &from = *source, to = TRY(File::create_anonymous(options.directory));
  const Index size = options.file_bytes;
  TRY(from.allocate(size));
  TRY(to.allocate(size));
  std::vector<Worker> workers(static_cast<std::size_t>(options.threads));
  for (Worker& worker : workers) {
    worker.memory = TRY(device.allocate(kChunk));
    worker.stream = TRY(device.stream());
  }
  Digest expected;
  const MutableBytes host = workers[0].memory->buffer().host;
  for (Index at = 0; at < size; at += kChunk) {
    const MutableBytes part = host.first(static_cast<std::size_t>(std::min(kChunk, size - at)));
    fill_randomly(part, static_cast<unsigned>(at / kChunk));
    TRY(from.write_at(at, part));
    expected += digest_run(part, at, 1);
  }
  const double plain = TRY(median_seconds([&] { return copy_file(from, to, size, false, workers); }));
  const double whole_way = TRY(median_seconds([&]() -> Status {
    for (Worker& worker : workers) worker.digest = {};
    TRY(copy_file(from, to, size, true, workers));
    const Digest sum = sum_of(workers);
    if (sum != expected) return internal_error("digest: expected " + expected.hex() + ", got " + sum.hex());
    return {};
  }));
  TRY(time_reading(source, size, expected, workers));
  for (Index at = 0; at < size; at += kChunk) {
    const MutableBytes part = host.first(static_cast<std::size_t>(std::min(kChunk, size - at)));
    TRY(to.read_at(at, part));
    Digest zero;
    for (std::size_t k = 0; k < zero.words.size(); ++k) zero.words[k] = 0 - digest_run(part, at, 1).words[k];
    expected += zero;
  }
  if (expected != Digest{}) return internal_error("the file that went through the device is another");
  const double gb = static_cast<double>(size) / 1e9, file = gb / plain, pipeline = gb / whole_way;
  const double slower = std::min(file, rates.both);
  std::printf("file -> host -> device -> digest -> host -> file, %s in %s, %d threads: %.2f GB/s\n",
              human_bytes(size).c_str(), options.directory.c_str(), options.threads, pipeline);
  std::printf("the slower of file -> host -> file (%.2f GB/s) and transfers both ways (%.1f GB/s): %.1f %% of it\n",
              file, rates.both, 100 * pipeline / slower);
  return {};
}

Status time_exchange(Device& device, const Options& options) {
  std::printf("\n| logical ranks on one GPU, over NCCL | GB/s moved |\n| ---: | ---: |\n");
  for (const int n : {2, 4, 8}) {
    const Index message = std::min(options.bytes, Index{1} << 30) / (n * (n - 1));
    double seconds = 0;
    TRY(run_nccl_ranks_on_one_gpu(n, {}, [&](Transport& ranks) -> Status {
      auto sent = TRY(device.allocate(message * (n - 1))), got = TRY(device.allocate(message * (n - 1)));
      const auto part = [&](const std::unique_ptr<Device::Memory>& memory, std::size_t i) {
        return memory->buffer().device.subspan(i * static_cast<std::size_t>(message),
                                               static_cast<std::size_t>(message));
      };
      const double mine = TRY(median_seconds([&]() -> Status {
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
    std::printf("| %d | %.1f |\n", n, static_cast<double>(message * n * (n - 1)) / seconds / 1e9);
  }
  return {};
}

// ---- the program

int usage(int code) {
  std::printf(
      "bench [--device cuda:N] [--bytes 1GiB] [--dir /tmp] [--file 4GiB] [--threads 8]\n"
      "      [--no-checks] [--no-large] [--checks-only]\n");
  return code;
}

Result<Options> parse_options(int argc, char** argv) {
  Options options;
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
    } else if (name == "--threads") {
      options.threads = std::max(1, std::atoi(TRY(value()).c_str()));
    } else if (name == "--no-checks") {
      options.checks = false;
    } else if (name == "--no-large") {
      options.large = false;
    } else if (name == "--checks-only") {
      options.timings = false;
    } else {
      return usage_error(name + ": not an option");
    }
  }
  if (options.bytes < (Index{1} << 28)) return usage_error("--bytes: expected 256MiB or more");
  return options;
}

Status run(Device& device, const Options& options) {
  if (options.checks) {
    std::printf("checks\n");
    TRY(check_all(device, options));
  }
  if (!options.timings) return {};
  TRY(time_kernels(device, options));
  const Rates rates = TRY(time_transfers(device, options));
  TRY(time_pipeline(device, options, rates));
  return time_exchange(device, options);
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
