#include "lib/engine/direct_reader.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace reshard {
namespace {

constexpr Index kLeast = Index{64} << 10;  // less is read faster through the cache

// How many bytes from `offset` on the page cache has, which are in `out` then; nothing where it does not tell.
Index read_cached(const File& file, Index offset, MutableBytes out) {
  const iovec part = {out.data(), out.size()};
  return std::max<Index>(0, ::preadv2(file.descriptor(), &part, 1, offset, RWF_NOWAIT));
}

std::shared_ptr<const File> open_direct(const File& file) {
  auto opened = file.reopen_direct();
  return opened ? std::make_shared<const File>(std::move(*opened)) : nullptr;
}

}  // namespace

Status DirectReader::read(const std::shared_ptr<const File>& file, Index offset, Index length, MutableBytes out,
                          Index at) {
  const MutableBytes wanted = out.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(length));
  const auto rest = [&](Index done) {
    return file->read_at(offset + done, wanted.subspan(static_cast<std::size_t>(done)));
  };
  if (length < kLeast) return rest(0);
  Index done = read_cached(*file, offset, wanted);
  if (length - done < kLeast) return rest(done);
  const auto past_cache = direct_.get(file, open_direct);
  if (!past_cache) return rest(done);
  // From the unit on in which the rest begins. The last read may end with the file.
  while (done < length) {
    const Index back = (offset + done) % File::kDirectUnit;
    std::byte* const to = wanted.data() + done - back;
    const Index bytes = end_of(back + length - done);
    const ssize_t n = ::pread(past_cache->descriptor(), to, static_cast<std::size_t>(bytes), offset + done - back);
    if (n <= back) {  // whatever it is, the ordinary way finds it too, or does not
      direct_.refuse(*file);
      return rest(done);
    }
    done = std::min(length, done + static_cast<Index>(n) - back);
  }
  return {};
}

}  // namespace reshard
