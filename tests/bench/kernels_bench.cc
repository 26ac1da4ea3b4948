// Measures the CPU kernels next to a memcpy of the same number of bytes. Every figure is the median of 7 rounds, in
// which kernel and memcpy alternate, so that a busy machine slows both.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "lib/device/convert.h"
#include "lib/device/copy.h"
#include "lib/device/crc32.h"
#include "lib/device/digest.h"
#include "lib/device/health.h"

namespace reshard {
namespace {

using Body = std::function<void()>;

double seconds(const Body& body, int repeats) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / repeats;
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

class Bench {
 public:
  explicit Bench(Index bytes)
      : bytes_(bytes), from_(static_cast<std::size_t>(bytes)), to_(static_cast<std::size_t>(4 * bytes)) {
    for (std::size_t i = 0; i < from_.size(); ++i) from_[i] = static_cast<std::byte>(digest_mix(i));
    std::memset(to_.data(), 1, to_.size());
    std::printf("\n%lld KiB read a call%*s GB/s  memcpy GB/s\n", static_cast<long long>(bytes >> 10), 26, "");
  }

  const std::byte* from() const { return from_.data(); }
  std::byte* to() { return to_.data(); }
  Index bytes() const { return bytes_; }
  Bytes input() const { return from_; }

  // Prints how fast `body` reads bytes().
  void report(const std::string& what, const Body& body) {
    const int repeats = static_cast<int>(std::max<Index>(1, (Index{1} << 27) / bytes_ / 4));
    const Body reference = [this] { std::memcpy(to_.data(), from_.data(), from_.size()); };
    std::vector<double> mine, theirs;
    seconds(body, 1);
    for (int round = 0; round < 7; ++round) {
      mine.push_back(seconds(body, repeats));
      theirs.push_back(seconds(reference, repeats));
    }
    std::printf("  %-44s %6.1f  %6.1f\n", what.c_str(), rate(median(mine)), rate(median(theirs)));
  }

 private:
  double rate(double s) const { return static_cast<double>(bytes_) / s / 1e9; }

  Index bytes_;
  std::vector<std::byte> from_;
  std::vector<std::byte> to_;
};

void bench_digest(Bench& bench) {
  for (const DigestVariant& variant : digest_variants())
    for (Index element_bytes : {1, 2}) {
      volatile std::uint32_t sink = 0;
      bench.report("digest, " + std::to_string(element_bytes) + "-byte elements, " + std::string(variant.name),
                   [&] { sink = sink + variant.run(bench.input(), 7, element_bytes).words[0]; });
    }
  volatile std::uint32_t sink = 0;
  bench.report("digest of a box with rows of 512 bf16", [&] {
    sink = sink +
           digest_box({bench.bytes() / 1024, 4096}, {{0, 512}, {bench.bytes() / 1024, 512}}, 2, bench.from()).words[0];
  });
  bench.report("crc32", [&] { sink = sink + crc32(0, bench.input()); });
}

// Uses finite values, the usual case. Measures the best variant, and the variant that works row by row.
void bench_health(Bench& bench) {
  constexpr DType kTypes[] = {DType::kFloat8E4M3, DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat64};
  for (DType dtype : kTypes) {
    std::vector<std::byte> finite(bench.from(), bench.from() + bench.bytes());
    const auto width = static_cast<std::size_t>(byte_size(dtype));
    for (std::size_t i = width - 1; i < finite.size(); i += width) finite[i] &= std::byte{0xbb};
    for (const HealthVariant& variant : health_variants()) {
      volatile Index sink = 0;
      bench.report("health, " + std::string(info(dtype).short_name) + ", " + std::string(variant.name),
                   [&] { sink = sink + variant.scan(dtype, finite).zeros; });
    }
    for (Index row : {64, 512, 4096}) {
      const Dims shape = {bench.bytes() / byte_size(dtype) / row, row};
      volatile Index sink = 0;
      bench.report("health, " + std::string(info(dtype).short_name) + ", rows of " + std::to_string(row), [&] {
        HealthScan scan(dtype, shape);
        scan.add(whole(shape), finite);
        sink = sink + scan.health().zeros;
      });
    }
  }
}

void bench_convert(Bench& bench) {
  constexpr DType kTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat64};
  for (const ConvertVariant& variant : convert_variants())
    for (DType from : kTypes)
      for (DType to : kTypes)
        if (from != to)
          bench.report(std::string(info(from).short_name) + " to " + std::string(info(to).short_name) + ", " +
                           std::string(variant.name),
                       [&] { variant.convert(from, to, bench.from(), bench.to(), bench.bytes() / byte_size(from)); });
}

void bench_copy(Bench& bench) {
  for (Index element_bytes : {1, 2, 4, 8}) {
    const Index columns = 512, rows = bench.bytes() / element_bytes / columns;
    bench.report("transpose, " + std::to_string(element_bytes) + "-byte elements", [&, rows] {
      copy_box({rows, columns}, element_bytes, bench.from(), {columns, 1}, bench.to(), {1, rows});
    });
  }
  for (Index row : {8, 24, 64, 256, 1024, 4096}) {
    const Index rows = bench.bytes() / row;
    bench.report("rows of " + std::to_string(row) + " bytes into rows twice as long", [&, rows] {
      copy_box({rows, row / 2}, 2, bench.from(), {row / 2, 1}, bench.to(), {row, 1});
    });
  }
  bench.report("swap_bytes of 4, in place", [&] {
    swap_bytes({bench.to(), static_cast<std::size_t>(bench.bytes())}, 4);
  });
}

}  // namespace
}  // namespace reshard

int main() {
  using namespace reshard;
  for (Index bytes : {Index{1} << 18, Index{1} << 26}) {
    Bench bench(bytes);
    bench_digest(bench);
    bench_health(bench);
    bench_convert(bench);
    bench_copy(bench);
  }
}
