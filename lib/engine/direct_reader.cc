#include "lib/engine/direct_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "lib/base/sys.h"

namespace reshard {
namespace {

constexpr Index kLeast = Index{64} << 10;  // less is read faster through the cache

// How many bytes from `offset` on lie in pages that are in memory; nothing where that is not to be known.
Index in_cache(const File& file, Index offset, Index length) {
  const Index page = ::sysconf(_SC_PAGESIZE);
  const Index back = offset % page;
  const auto size = static_cast<std::size_t>(back + length);
  void* const seen = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.descriptor(), offset - back);
  if (seen == MAP_FAILED) return 0;
  std::vector<unsigned char> pages(static_cast<std::size_t>(ceil_div(back + length, page)));
  const bool told = ::mincore(seen, size, pages.data()) == 0;
  ::munmap(seen, size);
  if (!told) return 0;
  const auto first_out = std::find_if(pages.begin(), pages.end(), [](unsigned char p) { return (p & 1) == 0; });
  return std::clamp<Index>((first_out - pages.begin()) * page - back, 0, length);
}

// How many bytes from `offset` on the page cache has, which are in `out` then.
Index read_cached(const File& file, Index offset, MutableBytes out) {
  const iovec part = {out.data(), out.size()};
  const ssize_t n = sys().preadv2(file.descriptor(), &part, 1, offset, RWF_NOWAIT);
  if (n >= 0 || errno != EOPNOTSUPP) return std::max<Index>(0, n);
  // Not every file system reads that way: overlays, as containers have them, and network file systems.
  const Index cached = in_cache(file, offset, static_cast<Index>(out.size()));
  return file.read_at(offset, out.first(static_cast<std::size_t>(cached))) ? cached : 0;
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
    const ssize_t n = sys().pread(past_cache->descriptor(), to, static_cast<std::size_t>(bytes), offset + done - back);
    if (n <= back) {  // whatever it is, the ordinary way finds it too, or does not
      direct_.refuse(*file);
      return rest(done);
    }
    done = std::min(length, done + static_cast<Index>(n) - back);
  }
  return {};
}

}  // namespace reshard
