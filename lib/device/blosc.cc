// SPDX-License-Identifier: Apache-2.0
#include "lib/device/blosc.h"

#include <cstring>

#include "lib/base/checked.h"
#include "lib/base/find_function.h"
#include "lib/base/memory_limit.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

// The first bytes of a buffer (c-blosc, README_CHUNK_FORMAT.rst): four of versions, flags and element size, then three
// numbers of 32 bits, little-endian.
constexpr std::size_t kHeader = 16, kSizesAt = 4;
constexpr Index kBlocksInMemory = 4;  // blocks that the library allocates for a call, at most

struct Blosc {
  // int blosc_decompress_ctx(const void* src, void* dest, size_t destsize, int numinternalthreads)
  int (*decompress)(const void*, void*, std::size_t, int) = nullptr;
};

Result<Blosc> load_blosc() {
  void* const opened = TRY(open_library({"libblosc.so.1"},
                                        "chunks compressed by blosc are read with its library, which is not installed "
                                        "(Debian: libblosc1; conda: blosc)"));
  Blosc out;
  TRY(find_function(opened, "libblosc", "blosc_decompress_ctx", out.decompress));
  return out;
}

const Result<Blosc>& blosc() {
  static const Result<Blosc> loaded = load_blosc();
  return loaded;
}

}  // namespace

Result<std::size_t> unblosc_chunk(Bytes in, MutableBytes out, const std::string& place) {
  const std::string what = place + ": blosc";
  if (in.size() < kHeader) return corrupt(what + ": expected a header, got " + bytes_of(in.size()));
  struct {
    std::uint32_t decoded, block, stored;
  } sizes{};
  std::memcpy(&sizes, in.data() + kSizesAt, sizeof sizes);
  if (sizes.stored != in.size())
    return corrupt(what + ": the header says " + bytes_of(sizes.stored) + ", and " + std::to_string(in.size()) +
                   " are stored");
  if (sizes.decoded > out.size() || sizes.block > sizes.decoded)
    return corrupt(what + ": expected at most " + bytes_of(out.size()) + ", got " + std::to_string(sizes.decoded) +
                   " in blocks of " + std::to_string(sizes.block));
  if (!blosc()) return Error(blosc().error().code(), what + ": " + blosc().error().message());
  TRY(may_take(kBlocksInMemory * Index{sizes.block}, [&] { return what; }));
  const int length = blosc()->decompress(in.data(), out.data(), out.size(), 1);
  if (length < 0 || static_cast<std::uint32_t>(length) != sizes.decoded)
    return corrupt(what + ": the buffer is damaged");
  return length;
}

}  // namespace reshard
