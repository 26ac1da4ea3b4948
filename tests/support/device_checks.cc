#include "tests/support/device_checks.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <vector>

#include "lib/device/convert.h"
#include "lib/device/copy.h"

namespace reshard {
namespace {

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  Index below(Index n) { return static_cast<Index>(engine_() % static_cast<std::uint64_t>(n)); }
  Index between(Index low, Index high) { return low + below(high - low + 1); }
  void fill(MutableBytes bytes) {
    for (std::size_t i = 0; i < bytes.size(); i += 8) {
      const std::uint64_t v = engine_();
      std::memcpy(bytes.data() + i, &v, std::min<std::size_t>(8, bytes.size() - i));
    }
  }

 private:
  std::mt19937_64 engine_;
};

// A buffer of a device with its own stream.
struct Place {
  std::unique_ptr<Device::Memory> memory;
  DeviceBuffer buffer;

  static Result<Place> make(Device& device, Index bytes) {
    Place place;
    place.memory = TRY(device.allocate(bytes));
    place.buffer = place.memory->buffer();
    if (static_cast<Index>(place.buffer.host.size()) != bytes ||
        static_cast<Index>(place.buffer.device.size()) != bytes)
      return internal_error("memory: expected " + std::to_string(bytes) + " bytes, got " +
                            std::to_string(place.buffer.host.size()) + " and " +
                            std::to_string(place.buffer.device.size()));
    return place;
  }
  std::byte* host() const { return buffer.host.data(); }
  std::byte* device() const { return buffer.device.data(); }
  Index size() const { return static_cast<Index>(buffer.host.size()); }
};

Status expect_equal(Bytes actual, Bytes expected, const std::string& what) {
  if (actual.empty() || std::memcmp(actual.data(), expected.data(), actual.size()) == 0) return {};
  const auto [a, e] = std::mismatch(actual.begin(), actual.end(), expected.begin(), expected.end());
  return internal_error(what + ": byte " + std::to_string(a - actual.begin()) + " of " + std::to_string(actual.size()) +
                        ": expected " + std::to_string(std::to_integer<int>(*e)) + ", got " +
                        std::to_string(std::to_integer<int>(*a)));
}

constexpr std::byte kUntouched{0xcc};

// Returns strides of a box inside larger memory, with its dimensions in random order.
Dims random_strides(Random& random, const Dims& shape, Index& elements) {
  std::vector<int> order;
  for (int d = 0; d < shape.rank(); ++d) order.push_back(d);
  if (random.below(2) == 0)
    for (std::size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[static_cast<std::size_t>(random.below(static_cast<Index>(i)))]);
  Dims strides = Dims::filled(shape.rank(), 0);
  elements = 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    strides[*d] = elements;
    elements *= shape[*d] + (random.below(4) == 0 ? random.below(3) : 0);
  }
  return strides;
}

Dims random_shape(Random& random, Index max_elements) {
  Dims shape;
  const Index rank = random.between(0, 5);
  Index n = 1;
  for (Index d = 0; d < rank; ++d) {
    const Index extent = random.between(1, std::clamp<Index>(max_elements / n, 1, rank <= 2 ? 600 : 12));
    shape.push_back(extent);
    n *= extent;
  }
  return shape;
}

}  // namespace

Status check_transfers(Device& device, unsigned seed) {
  Random random(seed);
  auto stream = TRY(device.stream());
  for (Index bytes : {Index{0}, Index{1}, Index{4095}, Index{4097}, Index{1} << 20}) {
    auto place = TRY(Place::make(device, bytes));
    if (bytes > 0 && reinterpret_cast<std::uintptr_t>(place.host()) % 4096 != 0)
      return internal_error("host memory: expected a page's first address");
    random.fill(place.buffer.host);
    const std::vector<std::byte> before(place.buffer.host.begin(), place.buffer.host.end());
    TRY(stream->upload(place.buffer, bytes));
    TRY(stream->wait());
    if (!device.is_cpu()) std::fill(place.buffer.host.begin(), place.buffer.host.end(), kUntouched);
    TRY(stream->download(place.buffer, bytes / 2));
    TRY(stream->wait());
    const auto half = static_cast<std::size_t>(bytes / 2);
    TRY(expect_equal(place.buffer.host.first(half), Bytes(before).first(half), "half of a transfer"));
    if (!device.is_cpu() && bytes > 0 && place.buffer.host.back() != kUntouched)
      return internal_error("half of a transfer: more arrived");
    TRY(stream->download(place.buffer, bytes));
    TRY(stream->wait());
    TRY(expect_equal(place.buffer.host, before, "a transfer"));
  }
  return {};
}

Status check_copies(Device& device, unsigned seed) {
  Random random(seed);
  auto stream = TRY(device.stream());
  constexpr Index kBytes = Index{2} << 20;
  auto from = TRY(Place::make(device, kBytes)), to = TRY(Place::make(device, kBytes));
  random.fill(from.buffer.host);
  const std::vector<std::byte> source(from.buffer.host.begin(), from.buffer.host.end());
  TRY(stream->upload(from.buffer, kBytes));
  for (int round = 0; round < 150; ++round) {
    const Index element_bytes = Index{1} << random.below(5);
    const Dims shape = random_shape(random, 20000);
    Index from_elements = 0, to_elements = 0;
    const Dims from_strides = random_strides(random, shape, from_elements);
    const Dims to_strides = random_strides(random, shape, to_elements);
    const Index offset = random.below(4) == 0 ? random.below(32) : 0;
    const Index used = to_elements * element_bytes + offset;
    if (used > kBytes || from_elements * element_bytes + offset > kBytes) continue;

    const auto bytes = static_cast<std::size_t>(used);
    std::memset(to.host(), std::to_integer<int>(kUntouched), bytes);
    TRY(stream->upload(to.buffer, used));
    TRY(stream->copy_box(shape, element_bytes, from.device() + offset, from_strides, to.device() + offset, to_strides));
    TRY(stream->download(to.buffer, used));
    TRY(stream->wait());
    std::vector<std::byte> expected(bytes, kUntouched);
    copy_box(shape, element_bytes, source.data() + offset, from_strides, expected.data() + offset, to_strides);
    TRY(expect_equal({to.host(), bytes}, expected,
                     "copy of " + to_string(shape) + " x " + std::to_string(element_bytes) + " at " +
                         std::to_string(offset) + ", " + to_string(from_strides) + " -> " + to_string(to_strides)));
  }
  return {};
}

Status check_conversions(Device& device, unsigned seed) {
  constexpr std::array<DType, 6> kFloats = {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kFloat16,
                                            DType::kBFloat16,   DType::kFloat32,    DType::kFloat64};
  Random random(seed);
  auto stream = TRY(device.stream());
  constexpr Index kMost = 66000;  // more than all 16-bit patterns, which the first two bytes of the elements enumerate
  auto in = TRY(Place::make(device, kMost * 8 + 64)), out = TRY(Place::make(device, kMost * 8 + 64));
  for (DType from : kFloats) {
    random.fill(in.buffer.host);
    for (Index i = 0; i < kMost; ++i) {
      const auto pattern = static_cast<std::uint16_t>(i);
      const Index bytes = std::min<Index>(byte_size(from), 2);  // the upper bytes, which contain the exponent
      std::memcpy(in.host() + (i + 1) * byte_size(from) - bytes, &pattern, static_cast<std::size_t>(bytes));
    }
    TRY(stream->upload(in.buffer, in.size()));
    for (DType to : kFloats)
      for (Index n : {Index{0}, Index{1}, Index{31}, Index{33}, Index{5000}, kMost})
        for (Index shift = 0; shift <= (n == kMost ? 0 : 1); ++shift) {
          const std::byte* source = in.host() + shift * byte_size(from);
          const Index at = shift * byte_size(to), used = n * byte_size(to) + at + 8;
          const auto bytes = static_cast<std::size_t>(used);
          std::vector<std::byte> expected(bytes, kUntouched);
          convert(from, to, source, expected.data() + at, n);
          std::memset(out.host(), std::to_integer<int>(kUntouched), bytes);
          TRY(stream->upload(out.buffer, used));
          TRY(stream->convert(from, to, in.device() + shift * byte_size(from), out.device() + at, n));
          TRY(stream->download(out.buffer, used));
          TRY(stream->wait());
          TRY(expect_equal({out.host(), bytes}, expected,
                           std::to_string(n) + " of " + std::string(info(from).torch_name) + " to " +
                               std::string(info(to).torch_name)));
        }
  }
  return {};
}

Status check_digests(Device& device, unsigned seed) {
  Random random(seed);
  auto stream = TRY(device.stream());
  constexpr Index kBytes = Index{1} << 20;
  auto data = TRY(Place::make(device, kBytes));
  random.fill(data.buffer.host);
  TRY(stream->upload(data.buffer, kBytes));
  // More digests than a stream keeps results for.
  std::vector<Digest> actual(300), expected(actual.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const Index element_bytes = Index{1} << random.below(5);
    Box box;
    box.shape = random_shape(random, kBytes / 32 / element_bytes);
    box.origin = box.shape;
    Dims tensor = box.shape;
    for (int d = 0; d < tensor.rank(); ++d) {
      box.origin[d] = random.below(2) == 0 ? 0 : random.below(1000);
      tensor[d] += box.origin[d] + (random.below(2) == 0 ? 0 : random.below(100));
    }
    const Index offset = random.below(3) == 0 ? random.below(64) : 0;
    expected[i] = digest_box(tensor, box, element_bytes, data.host() + offset);
    TRY(stream->digest_box(tensor, box, element_bytes, data.device() + offset, &actual[i]));
  }
  TRY(stream->wait());
  for (std::size_t i = 0; i < actual.size(); ++i)
    if (actual[i] != expected[i])
      return internal_error("digest " + std::to_string(i) + ": expected " + expected[i].hex() + ", got " +
                            actual[i].hex());
  return {};
}

Status check_chains(Device& device, unsigned seed) {
  Random random(seed);
  constexpr Index kRows = 96, kColumns = 160, kElements = kRows * kColumns;
  struct Chain {
    std::unique_ptr<Stream> stream;
    Place halves, turned, singles;
    Digest digest, expected;
  };
  std::array<Chain, 2> chains;
  for (Chain& chain : chains) {
    chain.stream = TRY(device.stream());
    chain.halves = TRY(Place::make(device, 2 * kElements));
    chain.turned = TRY(Place::make(device, 2 * kElements));
    chain.singles = TRY(Place::make(device, 4 * kElements));
  }
  for (int round = 0; round < 20; ++round) {
    for (Chain& chain : chains) {
      random.fill(chain.halves.buffer.host);
      std::vector<std::byte> turned(2 * kElements), singles(4 * kElements);
      copy_box({kColumns, kRows}, 2, chain.halves.host(), {1, kColumns}, turned.data(), {kRows, 1});
      convert(DType::kBFloat16, DType::kFloat32, turned.data(), singles.data(), kElements);
      chain.expected = digest_box({kColumns, kRows}, whole({kColumns, kRows}), 4, singles.data());
      Stream& stream = *chain.stream;
      TRY(stream.upload(chain.halves.buffer, 2 * kElements));
      TRY(stream.copy_box({kColumns, kRows}, 2, chain.halves.device(), {1, kColumns}, chain.turned.device(),
                          {kRows, 1}));
      TRY(stream.convert(DType::kBFloat16, DType::kFloat32, chain.turned.device(), chain.singles.device(), kElements));
      TRY(stream.digest_box({kColumns, kRows}, whole({kColumns, kRows}), 4, chain.singles.device(), &chain.digest));
    }
    for (Chain& chain : chains) {
      TRY(chain.stream->wait());
      if (chain.digest != chain.expected)
        return internal_error("a chain: expected " + chain.expected.hex() + ", got " + chain.digest.hex());
    }
  }
  return {};
}

}  // namespace reshard
